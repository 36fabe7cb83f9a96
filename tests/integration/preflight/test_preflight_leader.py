"""The leader of a preflight and hosts that say nothing, or anything: it ends in time, and names nobody for it."""

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined] # torch does not export them by name

from unbroken.preflight.leader import lead
from unbroken.preflight.options import Options, read_options

GOOD = {
    "name": "h",
    "domains": [],
    "gpus": 0,
    "versions": {"torch": "2.9.0+cu128", "nccl": "2.28.9"},
    "checks": [{"check": "matmul", "entity": "cpu", "verdict": "ok", "message": ""}],
}
PASSED = {"passed": True, "why": "", "gbits": 10.0}
WAIT = timedelta(seconds=100)

Play = Callable[[int, int, dict[str, Any]], Any]
"""What a host says of its pair, by its rank, the number of the order and its task; None: nothing."""


def options(num_hosts: int, *more: str) -> Options:
    words = ["--hosts", str(num_hosts), "--host-rank", "0", "--leader", "127.0.0.1:1", "--pair-timeout", "5"]
    return read_options([*words, "--arrival-timeout", "1", *more], {})


def passes(rank: int, number: int, task: dict[str, Any]) -> Any:
    return PASSED


def fly(num_hosts: int, arrivals: dict[int, Any], play: Play = passes, *more: str) -> dict[str, Any]:
    """Lead hosts of which each is a thread; `arrivals` has what they say first: a JSON value, or bytes."""
    store = HashStore()
    for rank, value in arrivals.items():
        _put(store, f"arrived/{rank}", value)
    hosts = [threading.Thread(target=_be_host, args=(store, rank, play), daemon=True) for rank in arrivals]
    for host in hosts:
        host.start()
    report = lead(options(num_hosts, *more), store)
    for host in hosts:
        host.join(100)
    return report


def _put(store: Store, key: str, value: Any) -> None:
    store.set(key, value if isinstance(value, bytes) else json.dumps(value))  # type: ignore[arg-type] # takes bytes too


def _be_host(store: Store, rank: int, play: Play) -> None:
    number = 1
    while True:
        store.wait([f"order/{number}"], WAIT)
        order = json.loads(store.get(f"order/{number}"))
        if "report" in order:
            store.set(f"read/{rank}", "{}")
            return
        task = order["tasks"].get(str(rank))
        said = None if task is None else play(rank, number, task)
        if said is not None:
            _put(store, f"result/{number}/{rank}", said)
        number += 1


def verdicts(report: dict[str, Any]) -> dict[int, tuple[str, str]]:
    return {host["rank"]: (host["verdict"], host["why"]) for host in report["hosts"]}


OK = ("ok", "passed")


def test_a_host_that_does_not_come_is_unknown() -> None:
    report = fly(4, dict.fromkeys((0, 1, 3), GOOD))
    assert verdicts(report) == {0: OK, 1: OK, 2: ("unknown", "silent"), 3: OK}
    assert report["hosts"][2]["evidence"] == "did not arrive"
    assert report["exitCode"] == 3


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\xff\x00{", id="no text"),
        pytest.param(b"[" * 100_000, id="nested"),
        pytest.param(b'{"name": "' + b"x" * (2 << 20) + b'"}', id="huge"),
        pytest.param([], id="a list"),
        pytest.param({}, id="empty"),
        pytest.param({**GOOD, "name": 3}, id="name"),
        pytest.param({**GOOD, "gpus": -1}, id="fewer than no GPUs"),
        pytest.param({**GOOD, "gpus": 1e9}, id="GPUs as a fraction"),
        pytest.param({**GOOD, "gpus": True}, id="GPUs as a truth"),
        pytest.param({**GOOD, "checks": []}, id="no checks"),
        pytest.param({**GOOD, "checks": [{"check": "matmul"}]}, id="half a check"),
        pytest.param({**GOOD, "versions": "2.9"}, id="versions"),
        pytest.param({**GOOD, "domains": [["rack"]]}, id="domains"),
    ],
)
def test_a_host_that_cannot_be_read_is_unknown_and_never_bad(garbage: Any) -> None:
    report = fly(3, {0: GOOD, 1: garbage, 2: GOOD})
    assert verdicts(report) == {0: OK, 1: ("unknown", "silent"), 2: OK}
    assert report["hosts"][1]["evidence"] == "what it says cannot be read"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(None, id="nothing"),
        pytest.param(b"{", id="no JSON"),
        pytest.param({**PASSED, "passed": "yes"}, id="passed as text"),
        pytest.param({**PASSED, "gbits": -1}, id="negative speed"),
        pytest.param(b'{"passed": true, "why": "", "gbits": NaN}', id="no number"),
        pytest.param(b'{"passed": true, "why": "", "gbits": 1e999}', id="infinite"),
        pytest.param({**PASSED, "why": ["a"]}, id="reason"),
    ],
)
def test_a_host_that_says_no_result_is_unknown_and_its_partner_is_ok(said: Any) -> None:
    report = fly(4, dict.fromkeys(range(4), GOOD), lambda rank, number, task: said if rank == 2 else PASSED)
    assert verdicts(report) == {0: OK, 1: OK, 2: ("unknown", "silent"), 3: OK}
    assert report["hosts"][2]["evidence"] == "arrived, and then did not answer"
    assert (len(report["untested"]), report["exitCode"]) == (1, 3)


def test_a_host_that_lies_about_all_of_its_pairs_is_named_alone() -> None:
    lie = {"passed": False, "why": "x" * 1000, "gbits": 0}
    report = fly(8, dict.fromkeys(range(8), GOOD), lambda rank, number, task: lie if rank == 5 else PASSED)
    assert {rank: said for rank, said in verdicts(report).items() if said != OK} == {5: ("bad", "proven-partners")}
    assert len(report["hosts"][5]["evidence"]) < 500


def test_a_slow_link_fails_where_a_speed_is_wanted() -> None:
    def play(rank: int, number: int, task: dict[str, Any]) -> Any:
        return {**PASSED, "gbits": 0.5 if task["meeting"].endswith("/0-1") else 10.0}

    report = fly(4, dict.fromkeys(range(4), GOOD), play, "--min-gbits", "5")
    assert set(verdicts(report).values()) == {OK}
    assert report["links"] == [
        {"hosts": ["h (rank 0)", "h (rank 1)"], "failed": 4, "why": "0.5 Gbit/s, want 5 at least"}
    ]
    assert fly(4, dict.fromkeys(range(4), GOOD), play)["exitCode"] == 0


def test_hosts_stand_in_the_order_of_their_domains() -> None:
    domains = {0: ["b"], 1: ["a"], 2: ["b"], 3: ["a"]}
    first: list[tuple[int, str]] = []

    def play(rank: int, number: int, task: dict[str, Any]) -> Any:
        if number == 1:
            first.append((rank, task["meeting"]))
        return PASSED

    report = fly(4, {rank: {**GOOD, "domains": each} for rank, each in domains.items()}, play)
    assert [host["rank"] for host in report["hosts"]] == [1, 3, 0, 2]
    partners = [{rank for rank, meeting in first if meeting == each} for each in sorted({each for _, each in first})]
    assert partners == [{1, 3}, {0, 2}]


def test_pairs_use_the_gpus_that_both_have_and_gloo_where_it_is_wanted() -> None:
    gpus: list[int] = []

    def play(rank: int, number: int, task: dict[str, Any]) -> Any:
        gpus.append(task["gpus"])
        return PASSED

    arrivals = {0: {**GOOD, "gpus": 8}, 1: {**GOOD, "gpus": 7}}
    report = fly(2, arrivals, play)
    assert "GPUs: 8 on h (rank 0); 7 on h (rank 1)" in report["differences"]
    fly(2, arrivals, play, "--backend", "gloo")
    assert gpus == [7, 7, 0, 0]


def test_bad_versions_are_named_once_with_all_hosts_that_have_them() -> None:
    old = {**GOOD, "versions": {"torch": "2.9.0+cu128", "nccl": "2.29.2"}}
    report = fly(3, {0: old, 1: GOOD, 2: old})
    assert set(verdicts(report).values()) == {OK}
    assert [(each["name"], each["version"], len(each["hosts"])) for each in report["badVersions"]] == [
        ("nccl", "2.29.2", 2)
    ]
    assert report["differences"] == ["nccl: 2.29.2 on h (rank 0), h (rank 2); 2.28.9 on h (rank 1)"]
    assert report["exitCode"] == 1
