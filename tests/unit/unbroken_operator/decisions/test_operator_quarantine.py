"""Nodes that fail jobs again and again: quarantined, never too many, and released."""

import asyncio
import copy
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import a_node, merge_patch

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters.errors import KubeConflict, KubeError, KubeRefused, KubeUnavailable, NotLeading
from unbroken_operator.adapters.quarantine_taints import QuarantineTaints
from unbroken_operator.api import layout
from unbroken_operator.api.status_models import MAX_SUSPECTS
from unbroken_operator.config import DEFAULT_LIMITS, parse
from unbroken_operator.decisions.quarantine import (
    JobsView,
    QuarantineDecision,
    QuarantineLimits,
    QuarantineMode,
    WithheldBecause,
    decide_quarantine,
    is_domain_label_unknown,
)
from unbroken_operator.decisions.snapshot import node_view

NOW = "2026-01-01T12:00:00Z"
LIMITS = QuarantineLimits(score=2.0, max_nodes=1, duration_s=3600.0, max_percent=100)
TAINT = {"key": layout.QUARANTINE, "effect": "NoSchedule"}


def blame(job: str, **scores: float) -> JobsView:
    """Return what a job, given as namespace/name, says now of nodes on which it ran."""
    items = [{"name": name, "faults": 1, "score": score, "scoreTime": NOW} for name, score in scores.items()]
    namespace, _, name = job.partition("/")
    return JobsView(namespace, name, items, frozenset(scores))


def blame_of_all(**scores: float) -> list[JobsView]:
    """Return what jobs of two namespaces say of nodes; half of each score is each one's."""
    halves = {name: score / 2 for name, score in scores.items()}
    return [blame("ml/one", **halves), blame("hpc/two", **halves)]


class Cluster:
    """Nodes as the API server holds them, and what taints them."""

    def __init__(
        self, *names: str, mode: QuarantineMode = QuarantineMode.ON, limits: QuarantineLimits = LIMITS
    ) -> None:
        self.items = {name: a_node(name) for name in names}
        self.jobs: list[JobsView] = []
        self.num_writes = 0
        self.counted: list[str] = []
        self.is_contended = False
        self.failing: dict[str, KubeError] = {}
        self.asked: list[str] = []
        self.may_act = True
        for item in self.items.values():
            item["metadata"]["resourceVersion"] = "1"
        kube: Any = self
        self.taints = QuarantineTaints(
            kube,
            lambda: {name: node_view(item) for name, item in self.items.items()},
            lambda: self.jobs,
            mode=mode,
            limits=limits,
            may_act=lambda: self.may_act,
            count_withheld=self.counted.append,
        )

    async def get(self, path: str) -> dict[str, Any]:
        """See Kube."""
        item = copy.deepcopy(self.items[path.rpartition("/")[2]])
        if self.is_contended:
            self.items[path.rpartition("/")[2]]["metadata"]["resourceVersion"] = "2"
        return item

    async def merge(self, path: str, patch: dict[str, Any]) -> dict[str, Any]:
        """See Kube."""
        name = path.rpartition("/")[2]
        self.asked.append(name)
        if name in self.failing:
            raise self.failing[name]
        if patch["metadata"]["resourceVersion"] != self.items[name]["metadata"]["resourceVersion"]:
            raise KubeConflict("409")
        self.num_writes += 1
        self.items[name] = merge_patch(self.items[name], patch)
        return self.items[name]

    def look(self, now: str = NOW) -> list[str]:
        """Let it look until it has nothing to do; return the nodes with the taint."""
        for _ in range(5):
            before = self.num_writes
            asyncio.run(self.taints.look(now))
            if self.num_writes == before:
                break
        taints = {name: (item.get("spec") or {}).get("taints") or [] for name, item in self.items.items()}
        return sorted(name for name, found in taints.items() if TAINT in found)


def test_a_node_that_failed_several_jobs_is_quarantined_with_the_reason_on_it() -> None:
    cluster = Cluster("a", "b")
    cluster.items["b"]["spec"] = {"taints": [{"key": "other", "value": "x", "effect": "NoExecute"}]}
    cluster.jobs = [blame("ml/one", b=1.0), blame("hpc/two", b=1.5)]
    assert cluster.look() == ["b"]
    assert cluster.items["b"]["spec"]["taints"][0] == {"key": "other", "value": "x", "effect": "NoExecute"}
    mark = cluster.items["b"]["metadata"]["annotations"][layout.QUARANTINE]
    assert mark == f"{NOW} score 2.5 of 2, from ml/one, hpc/two"
    assert cluster.num_writes == 1, "nothing more once it is done"


@pytest.mark.parametrize(
    ("jobs", "nodes"),
    [
        pytest.param(blame_of_all(a=1.9), [], id="not enough"),
        pytest.param(blame_of_all(a=9.0, b=0.6), [], id="a job that blames more nodes than may be blames itself"),
        pytest.param(blame_of_all(a=9.0, b=0.4), ["a"], id="what is all but forgotten is no blame"),
        pytest.param(
            [*blame_of_all(a=2.5), blame("x/three", b=1.0), blame("y/four", b=1.0), blame("z/five", b=1.0)],
            ["b"],
            id="the worst one only, as one may be",
        ),
        pytest.param(blame_of_all(gone=9.0), [], id="a node that is no more"),
    ],
)
def test_who_is_quarantined(jobs: list[JobsView], nodes: list[str]) -> None:
    cluster = Cluster("a", "b")
    cluster.jobs = jobs
    assert cluster.look() == nodes


def test_a_node_is_released_when_its_time_is_over_also_without_the_job_that_blamed_it() -> None:
    cluster = Cluster("a", "b")
    cluster.jobs = blame_of_all(a=3.0)
    assert cluster.look() == ["a"]
    cluster.jobs = []
    assert cluster.look("2026-01-01T12:59:59Z") == ["a"]
    assert cluster.look("2026-01-01T13:00:00Z") == []
    assert cluster.items["a"]["spec"]["taints"] == []
    assert layout.QUARANTINE not in cluster.items["a"]["metadata"]["annotations"]


def test_a_node_marked_by_a_clock_that_is_far_ahead_is_released_and_by_one_a_little_ahead_is_not() -> None:
    cluster = Cluster("a", "b")
    cluster.jobs = blame_of_all(a=3.0)
    assert cluster.look() == ["a"]
    cluster.jobs = []
    assert cluster.look("2026-01-01T11:00:01Z") == ["a"]
    assert cluster.look("2026-01-01T11:00:00Z") == []


def test_who_takes_the_taint_away_is_right_until_its_time_is_over() -> None:
    cluster = Cluster("a", "b")
    cluster.jobs = blame_of_all(a=30.0)
    assert cluster.look() == ["a"]
    cluster.items["a"]["spec"]["taints"] = []
    assert cluster.look("2026-01-01T12:30:00Z") == []
    assert cluster.look("2026-01-01T13:00:00Z") == ["a"], "it is as bad as before"


def test_a_taint_by_hand_stays_and_takes_one_of_the_places_and_a_label_exempts_a_node() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.items["c"]["spec"] = {"taints": [TAINT]}
    cluster.jobs = blame_of_all(a=3.0)
    assert cluster.look("2027-01-01T00:00:00Z") == ["c"]
    del cluster.items["c"]["spec"]
    cluster.items["a"]["metadata"]["labels"][layout.QUARANTINE] = "never"
    assert cluster.look() == []


@pytest.mark.parametrize(
    "mark", ["by the night shift", "2026-01-01", "20260101", "2026-W01-1", "2026-01-01T00:00:00 by hand"]
)
def test_a_mark_that_is_not_ours_is_left_alone_and_costs_other_nodes_nothing(mark: str) -> None:
    """Seen before: a time without a zone on any one node ended each look, for all of them."""
    cluster = Cluster("a", "b")
    cluster.items["a"]["metadata"]["annotations"] = {layout.QUARANTINE: mark}
    cluster.jobs = blame_of_all(a=9.0)
    assert cluster.look() == []
    assert cluster.num_writes == 0
    cluster.jobs = blame_of_all(b=9.0)
    assert cluster.look() == ["b"]
    cluster.jobs = []
    assert cluster.look("2030-01-01T00:00:00Z") == []
    assert cluster.items["a"]["metadata"]["annotations"] == {layout.QUARANTINE: mark}


@pytest.mark.parametrize("mode", [QuarantineMode.DRY_RUN, QuarantineMode.OFF])
def test_dry_run_says_once_what_it_would_do_and_does_nothing(
    mode: QuarantineMode, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster("a", mode=mode)
    cluster.jobs = blame_of_all(a=3.0)
    with caplog.at_level(logging.WARNING):
        if mode is QuarantineMode.OFF:
            asyncio.run(cluster.taints.run())
        else:
            assert cluster.look() == []
            assert cluster.look() == []
    assert cluster.num_writes == 0
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        []
        if mode is QuarantineMode.OFF
        else ["node would be quarantined, see --quarantine node=a why=score 3.0 of 2, from ml/one, hpc/two"]
    )


def test_nothing_is_written_without_the_lease_or_over_another_ones_change() -> None:
    cluster = Cluster("a")
    cluster.jobs = blame_of_all(a=3.0)
    cluster.may_act = False
    assert cluster.look() == []
    cluster.may_act, cluster.is_contended = True, True
    assert cluster.look() == []
    cluster.is_contended = False
    assert cluster.look() == ["a"]


@pytest.mark.parametrize("error", [KubeRefused("no"), KubeUnavailable("a webhook is down"), KubeConflict("409")])
def test_a_node_that_cannot_be_tainted_holds_up_no_other_and_is_told_once_an_hour(
    error: KubeError, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster("a", "b", "c", limits=QuarantineLimits(score=2.0, max_nodes=3, max_percent=100))
    cluster.jobs = blame_of_all(c=3.0)
    assert cluster.look("2026-01-01T11:59:00Z") == ["c"]
    cluster.failing = {"a": error, "c": error}
    cluster.jobs = blame_of_all(a=999.0, b=99.0)
    with caplog.at_level(logging.WARNING):
        for minute in range(60):
            assert cluster.look(f"2026-01-01T13:{minute:02}:00Z") == ["b", "c"]
        said = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
        said_of = [("release", "c"), ("taint", "a")]
        assert said == [f"{kind} of a node cannot be written node={node} error={error}" for kind, node in said_of]
        cluster.look("2026-01-01T14:00:00Z")
    assert caplog.text.count("taint of a node cannot be written node=a") == 2, "an hour later"
    cluster.failing = {}
    is_asked_again = not isinstance(error, KubeRefused)
    assert ("a" in cluster.look("2026-01-01T14:00:15Z")) is is_asked_again
    assert "a" in cluster.look("2026-01-01T15:00:00Z")


def test_a_node_that_is_refused_for_good_leaves_its_place_to_the_next() -> None:
    cluster = Cluster("a", "b")
    cluster.failing = {"a": KubeRefused("denied by a policy")}
    cluster.jobs = [*blame_of_all(a=9.0), blame("x/three", b=1.0), blame("y/four", b=1.0)]
    assert cluster.look() == []
    assert cluster.look() == ["b"], "one may be tainted"
    assert cluster.asked == ["a", "b"]


def test_nothing_more_is_asked_once_another_operator_may_lead() -> None:
    cluster = Cluster("a", "b", limits=QuarantineLimits(score=2.0, max_nodes=2, max_percent=100))
    cluster.failing = {"a": NotLeading()}
    cluster.jobs = blame_of_all(a=9.0, b=3.0)
    with pytest.raises(NotLeading):
        cluster.look()
    assert cluster.asked == ["a"]


def test_scores_decay() -> None:
    nodes = {"a": node_view(a_node("a"))}
    jobs = blame_of_all(a=3.0)
    assert decide_quarantine(nodes, jobs, "2026-01-01T12:30:01Z", LIMITS) == QuarantineDecision()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--quarantine-score", "0"],
        ["--quarantine-max-nodes", "0"],
        ["--quarantine-seconds", "1"],
        ["--quarantine-min-namespaces", "0"],
        ["--quarantine-max-percent", "0"],
        ["--quarantine-max-percent", "101"],
        ["--quarantine-domain-label", "topology.kubernetes.io/zone="],
        ["--quarantine-domain-label", "zone\n"],
        ["--quarantine-domain-label", "a" * 400],
    ],
)
def test_a_wrong_limit_is_refused_at_the_start(arguments: list[str], tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.touch()
    with pytest.raises(InputError, match=arguments[0]):
        parse(["--all-namespaces", "--kubeconfig", str(kubeconfig), *arguments])


def decide(
    jobs: list[JobsView], *items: dict[str, Any], limits: QuarantineLimits = DEFAULT_LIMITS
) -> tuple[list[str], dict[str, WithheldBecause]]:
    """Return the nodes that are quarantined, and those that are not with the reason."""
    nodes = {item["metadata"]["name"]: node_view(item) for item in items or [a_node(name) for name in "abcdefgh"]}
    decision = decide_quarantine(nodes, jobs, NOW, limits)
    withheld = {item.offender.name: item.because for item in decision.withheld}
    return [offender.name for offender in decision.quarantine], withheld


MANY = [blame(f"team-{number}/job", a=3.0) for number in range(4)]


def test_seven_quick_out_of_memory_kills_of_one_job_taint_no_node() -> None:
    assert decide([blame("ml/one", a=3.5)]) == ([], {"a": WithheldBecause.FEW_NAMESPACES})
    alone = QuarantineLimits(min_namespaces=1)
    assert decide([blame("ml/one", a=3.5)], limits=alone) == ([], {"a": WithheldBecause.ONE_SOURCE})


def test_one_namespace_taints_no_node_however_many_jobs_it_runs_unless_an_administrator_says_so() -> None:
    jobs = [blame(f"ml/job-{number}", a=9.0) for number in range(50)]
    assert decide(jobs) == ([], {"a": WithheldBecause.FEW_NAMESPACES})
    assert decide([*jobs, blame("hpc/two", a=0.5)]) == ([], {"a": WithheldBecause.ONE_SOURCE})
    assert decide([*jobs, blame("hpc/two", a=1.5)]) == (["a"], {})
    assert decide(jobs, limits=QuarantineLimits(min_namespaces=1)) == (["a"], {})


def test_a_job_that_names_a_node_on_which_none_of_its_pods_was_seen_counts_for_nothing() -> None:
    forged = [JobsView(job.namespace, job.name, job.suspects, frozenset("b")) for job in MANY]
    assert decide(forged) == ([], {})


@pytest.mark.parametrize("key", ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"])
@pytest.mark.parametrize("by", ["label", "taint"])
def test_a_node_of_the_control_plane_is_never_tainted(key: str, by: str) -> None:
    items = [a_node(name) for name in "abcdefgh"]
    if by == "label":
        items[0]["metadata"]["labels"][key] = ""
    else:
        items[0]["spec"] = {"taints": [{"key": key, "effect": "NoSchedule"}]}
    assert decide(MANY, *items) == ([], {"a": WithheldBecause.CONTROL_PLANE})


def test_no_more_than_a_share_of_the_cluster_is_tainted() -> None:
    limits = QuarantineLimits(max_nodes=100)
    jobs = [blame(f"team-{number}/job", **dict.fromkeys("abcdefgh", 3.0)) for number in range(4)]
    tainted, withheld = decide(jobs, limits=limits)
    assert tainted == ["a", "b"]
    assert withheld == dict.fromkeys("cdefgh", WithheldBecause.SHARE_OF_CLUSTER)
    assert decide(MANY, *(a_node(name) for name in "abc")) == ([], {"a": WithheldBecause.SHARE_OF_CLUSTER})


def test_no_more_than_a_share_of_a_domain_is_tainted() -> None:
    limits = QuarantineLimits(max_nodes=100, domain_label="example.com/rack")
    items = [a_node(name, rack="r1" if name in "abcd" else "r2") for name in "abcdefgh"]
    jobs = [blame(f"team-{number}/job", a=3.0, b=3.0) for number in range(4)]
    assert decide(jobs, *items, limits=limits) == (["a"], {"b": WithheldBecause.SHARE_OF_DOMAIN})


def test_nodes_of_the_control_plane_make_no_share_larger() -> None:
    """Three workers beside five nodes of the control plane are three: a quarter of them is none."""
    control_plane = [a_node(name, rack="r1") for name in "defgh"]
    for item in control_plane:
        item["metadata"]["labels"]["node-role.kubernetes.io/control-plane"] = ""
    workers = [a_node(name, rack="r1") for name in "abc"]
    assert decide(MANY, *workers, *control_plane) == ([], {"a": WithheldBecause.SHARE_OF_CLUSTER})
    others = [a_node(f"other-{number}", rack="r2") for number in range(9)]
    limits = QuarantineLimits(domain_label="example.com/rack")
    assert decide(MANY, *workers, *control_plane, *others, limits=limits) == (
        [],
        {"a": WithheldBecause.SHARE_OF_DOMAIN},
    )


def test_a_job_blames_no_more_nodes_than_its_status_may_hold() -> None:
    limits = QuarantineLimits(max_nodes=1000)
    names = [f"n{number}" for number in range(MAX_SUSPECTS + 1)]
    jobs = [blame(f"team-{number}/job", **dict.fromkeys(names, 3.0)) for number in range(4)]
    nodes = [a_node(name) for name in names]
    tainted, withheld = decide(jobs, *nodes, limits=limits)
    assert len(tainted) == len(nodes) // 4
    assert names[-1] not in {*tainted, *withheld}
    assert decide([blame(job.namespace + "/job", **{names[-1]: 3.0}) for job in jobs], *nodes, limits=limits) == (
        [names[-1]],
        {},
    )


def test_no_node_is_tainted_while_none_has_the_label_of_domains() -> None:
    limits = QuarantineLimits(max_nodes=100, domain_label="example.com/rakc")
    items = [a_node(name, rack="r1") for name in "abcdefgh"]
    assert decide(MANY, *items, limits=limits) == ([], {"a": WithheldBecause.NO_DOMAIN})
    nodes = {item["metadata"]["name"]: node_view(item) for item in items}
    assert is_domain_label_unknown(nodes, limits)
    for known in (QuarantineLimits(), QuarantineLimits(domain_label="example.com/rack")):
        assert not is_domain_label_unknown(nodes, known)
    assert not is_domain_label_unknown({}, limits), "nothing is known of nodes"


def test_a_label_that_no_node_has_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = {"a": node_view(a_node("a", rack="r1"))}
    limits = QuarantineLimits(domain_label="example.com/rakc")
    kube: Any = None  # nothing is written
    taints = QuarantineTaints(kube, lambda: nodes, list, mode=QuarantineMode.DRY_RUN, limits=limits)
    for _ in range(3):
        asyncio.run(taints.look(NOW))
    (told,) = caplog.messages
    assert told.endswith("label=example.com/rakc")


def test_what_is_said_of_withheld_nodes_is_bounded() -> None:
    names = [f"n{number:03}" for number in range(200)]
    limits = QuarantineLimits(max_nodes=1000, max_percent=1)
    jobs = [
        blame(f"team-{number}/{index}", **dict.fromkeys(names[index * 20 :][:20], 3e30))
        for number in range(50)
        for index in range(10)
    ]
    nodes = {name: node_view(a_node(name)) for name in names}
    decision = decide_quarantine(nodes, jobs, NOW, limits)
    assert (len(decision.quarantine), len(decision.withheld)) == (2, 20)
    assert decision.quarantine[0].reason == (
        "score 50000.0 of 3, from team-0/0, team-1/0, team-2/0, team-3/0, team-4/0 and 45 more"
    )


@pytest.mark.parametrize(
    "broken",
    [
        {"scoreTime": "soon"},
        {"scoreTime": "2026-01-01T12:00:00"},
        {"score": 10**400},
        {"score": "x"},
        {"score": None},
        {"name": ["a"]},
    ],
)
def test_a_status_that_cannot_be_read_costs_the_other_jobs_nothing(broken: dict[str, Any]) -> None:
    item = {"name": "a", "faults": 1, "score": 9.0, "scoreTime": NOW, **broken}
    jobs = [JobsView("bad", "job", [item, {}], frozenset("a")), *MANY]
    assert decide(jobs) == (["a"], {})


def test_a_withheld_taint_is_told_and_counted_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster("a")
    cluster.jobs = [blame("ml/one", a=3.5)]
    with caplog.at_level(logging.WARNING):
        assert cluster.look() == cluster.look() == []
    assert [record.getMessage() for record in caplog.records] == [
        "node is not quarantined node=a because=few-namespaces: 1 of 2 namespaces blame it"
        " why=score 3.5 of 2, from ml/one"
    ]
    assert cluster.counted == ["few-namespaces"]
