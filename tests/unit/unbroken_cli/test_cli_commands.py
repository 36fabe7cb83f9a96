"""What `unbroken topology`, `why` and `status` ask of an API server, and what they make of its answers."""

import json
from typing import Any

import pytest

from unbroken_cli.commands import framework, status, topology, why
from unbroken_cli.errors import CommandError, NotThere

from .test_cli_text import ANSWERED_AT, LEASE, condition, lease, running

JsonObject = dict[str, Any]


class Cluster:
    """An API server with one job and its two pods."""

    namespace = "ml"

    def __init__(self, lease: JsonObject | None = None, **status: Any) -> None:
        self._lease = lease
        metadata = {"name": "digits", "namespace": "ml", "uid": "uid"}
        self.item: JsonObject = {"metadata": metadata, "status": running(lease=LEASE, **status)}

    def job(self, namespace: str, _name: str) -> JsonObject:
        if namespace != self.namespace:
            raise NotThere(f"job in {namespace}: there is none")
        return self.item

    def jobs(self, namespace: str | None) -> list[JsonObject]:
        return [self.item] if namespace in (None, self.namespace) else []

    def check_namespace(self, name: str) -> None:
        if name == "secret":
            raise CommandError("you may not read them")
        if name not in (self.namespace, "idle"):
            raise NotThere(f"namespace {name!r}: there is none")

    def events(self, _namespace: str, _name: str, _uid: str) -> list[JsonObject]:
        return []

    def pods(self, _namespace: str, _job: str) -> list[JsonObject]:
        roles = {"digits-0": "active", "digits-1": "spare"}
        return [
            {"metadata": {"name": name, "labels": {"unbroken.dev/role": role}}, "status": {"phase": "Running"}}
            for name, role in roles.items()
        ]

    def lease(self, namespace: str, name: str) -> tuple[JsonObject, str]:
        assert f"{namespace}/{name}" == LEASE
        if self._lease is None:
            raise NotThere("none")
        return self._lease, ANSWERED_AT


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what puts a cluster in the place of that of the kubeconfig."""

    def put(cluster: Cluster) -> None:
        for module in (framework, topology):
            monkeypatch.setattr(module, "connect", lambda _arguments: cluster)

    return put


def test_roles_that_no_operator_keeps_up_to_date_are_not_told_as_true(
    connect: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(Cluster(lease(renewTime="2026-01-01T00:18:00Z")))
    assert topology.main(["digits"]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith("digits in namespace ml: UNKNOWN: no operator keeps this up to date: its Lease")
    assert head.endswith("120 s ago. Roles are as of then; --url asks the rendezvous for them")
    assert rest[0] == "digits in namespace ml: 1 active, 1 spare"
    assert topology.main(["digits", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["stale"].endswith("120 s ago")
    assert [place["role"] for place in told["places"]] == ["active", "spare"]


@pytest.mark.parametrize(
    ("state", "changes", "first", "last"),
    [
        pytest.param("Running", {}, "1 active, 1 spare", "", id="an operator is there"),
        pytest.param(
            "Complete", {"renewTime": "2026-01-01T00:18:00Z"}, "1 active, 1 spare", "", id="an end stays true"
        ),
        pytest.param("Running", {"holderIdentity": ""}, "UNKNOWN", "", id="nobody holds the Lease"),
        pytest.param("Running", None, "1 active, 1 spare", "PERHAPS NOT UP TO DATE", id="an operator without a Lease"),
    ],
)
def test_a_tree_says_how_far_its_roles_can_be_trusted(
    connect: Any, capsys: pytest.CaptureFixture[str], state: str, changes: JsonObject | None, first: str, last: str
) -> None:
    cluster = Cluster(lease(**(changes or {})), state=state)
    if changes is None:
        del cluster.item["status"]["lease"]
        cluster.item["metadata"]["managedFields"] = [{"time": "2026-01-01T00:06:00Z", "subresource": "status"}]
    connect(cluster)
    assert topology.main(["digits"]) == 0
    head, *_, tail = capsys.readouterr().out.splitlines()
    assert head.startswith(f"digits in namespace ml: {first}")
    assert tail.startswith(last or "  digits-1")


def test_of_a_job_that_is_being_deleted_roles_are_of_before(connect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(lease())
    cluster.item["metadata"]["deletionTimestamp"] = "2026-01-01T00:19:00Z"
    connect(cluster)
    assert topology.main(["digits"]) == 0
    assert "BEING DELETED since 2026-01-01T00:19:00Z. Roles" in capsys.readouterr().out.splitlines()[0]


def test_why_of_a_job_that_failed_before_its_first_fault_says_so_and_what_to_do(
    connect: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = condition("Failed", "True", "FailedBeforeReady", "digits-0 worker 0 ended 5 times: exited with code 3")
    connect(Cluster(lease(), state="Failed", history=[], conditions=[failed]))
    assert why.main(["digits"]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith("digits in namespace ml: FAILED: digits-0 worker 0")
    assert any(line.startswith("  next  ") for line in rest)
    assert any("logs digits-0" in line for line in rest)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["-n", "typo"], 1, "unbroken status: namespace 'typo': there is none; see -n and -A"),
        (["-n", "idle"], 0, "there are no jobs here; see -n and -A"),
        (["-n", "secret"], 0, "there are no jobs here; see -n and -A"),
        (["digits", "-n", "typo"], 1, "; namespace ml has one, see -n"),
        (["other", "-n", "typo"], 1, "; there is no such namespace; see -n and -A"),
        (["other", "-n", "idle"], 1, "; there are no jobs; see -n and -A"),
    ],
)
def test_a_namespace_that_does_not_exist_is_no_idle_one(
    connect: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, told: str
) -> None:
    connect(Cluster(lease()))
    assert status.main(arguments) == code
    shown = capsys.readouterr()
    assert (shown.err if code else shown.out).rstrip().endswith(told)
