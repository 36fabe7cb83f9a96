"""What a preflight says to people, and with which exit code."""

from collections.abc import Callable

import pytest

from unbroken.preflight.options import read_options
from unbroken.preflight.report import HostRecord, RoundFacts, Speed, line_of_host, lines_of, make_report
from unbroken.preflight.statements import Arrival
from unbroken_core.preflight.judging import judge
from unbroken_core.preflight.pairing import next_round
from unbroken_core.preflight.trials import HostState, Pair, Trial

OPTIONS = read_options([], {})
WELL = {"check": "matmul", "entity": "cuda:3", "verdict": "ok", "message": ""}
ILL = {**WELL, "verdict": "bad", "message": "1 of 9 products are wrong"}


def report_of(
    num_hosts: int, passes: Callable[[Pair], bool], ill: tuple[int, ...] = (), away: tuple[int, ...] = ()
) -> dict[str, object]:
    hosts = []
    for rank in range(num_hosts):
        arrival = Arrival(f"n{rank}", (), 8, {"nccl": "2.28.9"}, (ILL if rank in ill else WELL,))
        state = HostState.BROKEN if rank in ill else HostState.SILENT if rank in away else HostState.ABLE
        hosts.append(HostRecord(rank, None if rank in away else arrival, state))
    states = [host.state for host in hosts]
    trials: list[Trial] = []
    last = 0
    while found := next_round(states, trials, last):
        last = found.number
        trials += [Trial(pair, passes(pair)) for pair in found.pairs]
    reasons = {trial.pair: "no end within 5 s" for trial in trials if not trial.has_passed}
    speeds = [Speed(trial.pair, 10.0 + trial.pair.right) for trial in trials if trial.has_passed]
    return make_report(OPTIONS, hosts, judge(states, trials), RoundFacts(reasons, speeds, last, 2.5))


def test_all_is_well() -> None:
    report = report_of(4, lambda pair: True)
    assert report["exitCode"] == 0
    assert lines_of(report) == [
        "preflight of 4 hosts: 2 rounds of pairs, 2.5 s",
        "ok       4 hosts: n0, n1, n2, n3",
        "speed    11 Gbit/s (n0 <-> n1) to 13 Gbit/s (n1 <-> n3)",
    ]
    assert line_of_host(report, 2) == "preflight: n2 is ok"


def test_what_is_bad_comes_first_with_its_evidence() -> None:
    report = report_of(8, lambda pair: 5 not in pair and pair != (0, 1), ill=(2,), away=(7,))
    assert report["exitCode"] == 1
    lines = lines_of(report)
    assert lines[1] == "bad      n2: matmul cuda:3: 1 of 9 products are wrong"
    assert lines[2].startswith("bad      n5: failed 4 of 4 tests with ")
    assert lines[2].endswith(", who pass with others (no end within 5 s)")
    assert lines[3] == "unknown  rank 7: did not arrive"
    assert lines[4] == "link     n0 <-> n1: failed 4 times (no end within 5 s)"
    assert line_of_host(report, 2).startswith("preflight: n2 is bad: matmul cuda:3: 1 of 9 products are wrong; 1 other")


def test_a_host_whose_checks_had_no_core_is_unknown_and_not_bad() -> None:
    check = {**WELL, "verdict": "unknown", "message": "no end within 60 s, as this host is busy"}
    hosts = [HostRecord(0, Arrival("n0", (), 0, {}, (check,)), HostState.SILENT)]
    report = make_report(OPTIONS, hosts, judge([HostState.SILENT], []), RoundFacts({}, [], 0, 2.5))
    assert report["exitCode"] == 3
    assert lines_of(report)[1] == "unknown  n0: matmul cuda:3: no end within 60 s, as this host is busy"


@pytest.mark.parametrize(
    ("report", "code"),
    [
        pytest.param(report_of(1, lambda pair: True), 0, id="one host"),
        pytest.param(report_of(1, lambda pair: True, ill=(0,)), 1, id="one bad host"),
        pytest.param(report_of(2, lambda pair: False), 1, id="the only pair"),
        pytest.param(report_of(4, lambda pair: True, away=(1,)), 3, id="one did not arrive"),
        pytest.param(report_of(8, lambda pair: False), 3, id="no pair passes: nobody to name"),
    ],
)
def test_exit_codes(report: dict[str, object], code: int) -> None:
    assert report["exitCode"] == code
