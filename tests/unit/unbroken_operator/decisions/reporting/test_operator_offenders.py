"""The condition of nodes on which jobs fail again and again: told, bounded, and taken back."""

import asyncio
import logging
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import a_node, merge_patch

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters.errors import KubeError, KubeRefused
from unbroken_operator.adapters.quarantine_taints import QuarantineTaints
from unbroken_operator.api import layout
from unbroken_operator.config import parse
from unbroken_operator.decisions.quarantine import JobsView, QuarantineLimits, QuarantineMode
from unbroken_operator.decisions.reporting.offenders import MAX_MESSAGE, OffenderChange
from unbroken_operator.decisions.snapshot import node_view

NOW, LATER, OVER = "2026-01-01T12:00:00Z", "2026-01-01T12:59:59Z", "2026-01-01T13:00:00Z"
LIMITS = QuarantineLimits(score=2.0, max_nodes=1, duration_s=3600.0, max_percent=100)
ON, DRY_RUN = QuarantineMode.ON, QuarantineMode.DRY_RUN
Conditions = dict[str, dict[str, Any]]


def blame(job: str = "job", **scores: float) -> list[JobsView]:
    """Return what jobs of two namespaces say of nodes; half of each score is each one's."""
    items = [
        {"name": name, "faults": 1, "score": score / 2, "scoreTime": "2026-01-01T12:00:00Z"}
        for name, score in scores.items()
    ]
    return [JobsView(namespace, job, items, frozenset(scores)) for namespace in ("ml", "hpc")]


class Cluster:
    """Nodes as the API server holds them."""

    def __init__(self, *names: str, mode: QuarantineMode = DRY_RUN, limits: QuarantineLimits = LIMITS) -> None:
        self.items = {name: a_node(name) for name in names}
        for item in self.items.values():
            item["metadata"]["resourceVersion"] = "1"
        self.jobs: list[JobsView] = []
        self.num_writes = 0
        self.refused: dict[str, KubeError] = {}
        self.untaintable: set[str] = set()
        self.may_act = True
        kube: Any = self
        self.taints = QuarantineTaints(
            kube,
            lambda: {name: node_view(item) for name, item in self.items.items()},
            lambda: self.jobs,
            mode=mode,
            limits=limits,
            has_condition=True,
            may_act=lambda: self.may_act,
        )

    async def get(self, path: str) -> dict[str, Any]:
        """See Kube."""
        return self.items[path.rpartition("/")[2]]

    async def merge(self, path: str, patch: dict[str, Any]) -> dict[str, Any]:
        """See Kube."""
        name = path.rpartition("/")[2]
        if name in self.untaintable:
            raise KubeRefused("denied by a webhook")
        self.items[name] = merge_patch(self.items[name], patch)
        return self.items[name]

    async def merge_lists(self, path: str, patch: dict[str, Any]) -> dict[str, Any]:
        """See Kube; as the API server does with conditions, by their types."""
        name, subresource = path.split("/")[-2:]
        assert subresource == "status"
        if name in self.refused:
            raise self.refused[name]
        self.num_writes += 1
        (change,) = patch["status"]["conditions"]
        status = self.items[name]["status"]
        status["conditions"] = [item for item in status["conditions"] if item["type"] != change["type"]]
        if change.get("$patch") != "delete":
            status["conditions"].append(change)
        return self.items[name]

    def look(self, now: str = NOW) -> Conditions:
        """Let it look until it has nothing to do; return the condition of the nodes that have it."""
        for _ in range(3):
            asyncio.run(self.taints.look(now))
        found = {
            name: [each for each in item["status"]["conditions"] if each["type"] == layout.OFFENDER_CONDITION]
            for name, item in self.items.items()
        }
        return {name: conditions[0] for name, conditions in found.items() if conditions}


@pytest.mark.parametrize("mode", [ON, DRY_RUN])
def test_a_node_that_is_or_would_be_quarantined_says_so_and_why_for_as_long(mode: QuarantineMode) -> None:
    cluster = Cluster("a", "b", mode=mode)
    cluster.jobs = blame(a=3.0)
    why = "training jobs failed here again and again: score 3.0 of 2, from ml/job, hpc/job"
    told = {
        "type": "UnbrokenRepeatOffender",
        "status": "True",
        "reason": "JobsFailThere",
        "message": why,
        "lastHeartbeatTime": NOW,
        "lastTransitionTime": NOW,
    }
    assert cluster.look() == {"a": told}
    cluster.jobs = []
    assert cluster.look(LATER) == {"a": told}
    assert cluster.num_writes == 1, "written once"
    assert cluster.look(OVER) == {}
    assert [item["type"] for item in cluster.items["a"]["status"]["conditions"]] == ["Ready"]
    assert cluster.num_writes == 2


@pytest.mark.parametrize("mode", [ON, DRY_RUN])
def test_a_worse_node_takes_no_place_that_is_taken(mode: QuarantineMode) -> None:
    cluster = Cluster("a", "b", mode=mode)
    cluster.jobs = blame(a=3.0)
    assert list(cluster.look()) == ["a"]
    cluster.jobs = [*blame(a=3.0), *blame("other", b=9.0)]
    assert list(cluster.look()) == ["a"]


@pytest.mark.parametrize("reason", ["cordoned", "refused"])
def test_in_a_dry_run_a_node_that_gets_no_condition_leaves_its_place_to_the_next(reason: str) -> None:
    cluster = Cluster("a", "b", "c")
    if reason == "cordoned":
        cluster.items["a"]["spec"] = {"unschedulable": True}
    else:
        cluster.refused["a"] = KubeRefused("forbidden")
    cluster.jobs = [*blame(a=9.0), *blame("other", b=5.0), *blame("third", c=4.0)]
    assert list(cluster.look()) == ["b"]
    cluster.items["a"]["spec"], cluster.refused = {}, {}
    assert list(cluster.look(LATER)) == ["b"], "the place is taken"


def test_who_is_not_believed_or_is_exempt_is_not_told_of() -> None:
    cluster = Cluster("a", "b")
    cluster.jobs = blame(a=30.0)[:1]
    assert cluster.look() == {}, "one namespace alone"
    cluster.jobs = blame(a=3.0)
    assert list(cluster.look()) == ["a"]
    cluster.items["a"]["metadata"]["labels"][layout.QUARANTINE] = "never"
    assert cluster.look() == {}, "forgiven by a person"


def test_a_person_who_releases_a_node_takes_the_condition_back_as_well() -> None:
    cluster = Cluster("a", mode=ON)
    cluster.jobs = blame(a=3.0)
    assert list(cluster.look()) == ["a"]
    cluster.items["a"]["spec"]["taints"] = []
    assert cluster.look(LATER) == {}
    cluster.items["a"]["spec"]["taints"] = [{"key": layout.QUARANTINE, "effect": "NoSchedule"}]
    cluster.items["a"]["metadata"]["annotations"] = {layout.QUARANTINE: "by the night shift"}
    assert cluster.look(LATER) == {}, "a person's own"


@pytest.mark.parametrize(
    "owned",
    [
        pytest.param({"spec": {"unschedulable": True}}, id="cordoned"),
        pytest.param(
            {"status": {"conditions": [{"type": "SysLogsXIDError", "status": "True"}]}}, id="NVSentinel has found it"
        ),
        pytest.param(
            {"status": {"conditions": [{"type": "KernelDeadlock", "status": "True"}]}}, id="node-problem-detector has"
        ),
    ],
)
@pytest.mark.parametrize("mode", [ON, DRY_RUN])
def test_a_node_that_somebody_has_in_hand_is_left_to_them(mode: QuarantineMode, owned: dict[str, Any]) -> None:
    cluster = Cluster("a", mode=mode)
    before = cluster.items["a"]
    cluster.items["a"] = merge_patch(before, owned)
    cluster.jobs = blame(a=3.0)
    assert cluster.look() == {}
    cluster.items["a"] = merge_patch(before, {})
    assert list(cluster.look()) == ["a"]
    cluster.items["a"]["spec"] = {**(cluster.items["a"].get("spec") or {}), "unschedulable": True}
    assert list(cluster.look()) == ["a"], "what was told stays while they look at it"


@pytest.mark.parametrize("since", [None, "soon", "2099-01-01T00:00:00Z", "2020-01-01T00:00:00Z"])
def test_a_condition_without_a_time_of_ours_is_taken_away(since: str | None) -> None:
    cluster = Cluster("a")
    forged = {"type": layout.OFFENDER_CONDITION, "status": "True", "lastTransitionTime": since}
    cluster.items["a"]["status"]["conditions"].append(forged)
    assert cluster.look() == {}


def test_a_node_that_cannot_be_written_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster("a", "b", limits=QuarantineLimits(score=2.0, max_nodes=2, max_percent=100))
    cluster.refused["a"] = KubeRefused("forbidden")
    cluster.jobs = blame(a=3.0, b=3.0)
    with caplog.at_level(logging.WARNING):
        assert list(cluster.look()) == ["b"]
        assert list(cluster.look("2026-01-01T12:30:00Z")) == ["b"]
    assert caplog.text.count("condition of a node cannot be written node=a error=forbidden") == 1


def test_a_taint_that_is_refused_holds_up_no_condition() -> None:
    cluster = Cluster("a", "b", mode=ON, limits=QuarantineLimits(score=2.0, max_nodes=2, max_percent=100))
    cluster.jobs = blame(a=3.0)
    assert list(cluster.look()) == ["a"]
    cluster.untaintable = {"b"}
    cluster.items["a"]["spec"]["taints"] = []
    cluster.jobs = blame(b=9.0)
    assert cluster.look(LATER) == {}, "released by a person"


def test_nothing_is_told_without_the_lease() -> None:
    cluster = Cluster("a")
    cluster.may_act = False
    cluster.jobs = blame(a=3.0)
    assert cluster.look() == {}


def test_the_message_is_bounded() -> None:
    (condition,) = OffenderChange("a", NOW, "x" * 10_000).to_patch()["status"]["conditions"]
    assert len(condition["message"]) == MAX_MESSAGE


def test_what_somebody_else_wrote_as_the_reason_is_bounded_and_quoted(caplog: pytest.LogCaptureFixture) -> None:
    """Seen before: line ends in an annotation forged lines of the log, and 100 KB of it went there."""
    cluster = Cluster("a", mode=ON)
    cluster.items["a"]["spec"] = {"taints": [{"key": layout.QUARANTINE, "effect": "NoSchedule"}]}
    mark = f"{NOW} x\n2026 ERROR forged\x1b[31m node=b why=" + "y" * 100_000
    cluster.items["a"]["metadata"]["annotations"] = {layout.QUARANTINE: mark}
    with caplog.at_level(logging.WARNING):
        told = cluster.look()["a"]["message"]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("node offends again and again node=a why='x\\\\n2026 ERROR forged\\\\x1b[31m node=b why=yy")
    assert line.endswith("yy'")
    assert line.isprintable()
    assert len(line) < 2 * MAX_MESSAGE
    assert told.isprintable()
    assert len(told) == MAX_MESSAGE


def test_a_condition_wants_a_quarantine_that_looks_at_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    words = ["--sidecar-image", "r.io/sidecar:1", "--all-namespaces", "--quarantine-condition"]
    assert parse(words).has_node_condition
    with pytest.raises(InputError, match=r"^--quarantine-condition: wants --quarantine on or dry-run, got off"):
        parse([*words, "--quarantine", "off"])
