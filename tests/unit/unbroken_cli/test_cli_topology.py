"""What `unbroken topology` shows of a job's pods."""

import json
from typing import Any

from unbroken_cli.tree import PodPlace, tree_from_objects, tree_from_status, tree_lines
from unbroken_core.protocol.messages import PROTOCOL, JobStatus, PodStatus
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Role, WorkerPhase

JsonObject = dict[str, Any]
JOB: JsonObject = {
    "metadata": {"name": "digits", "namespace": "ml"},
    "spec": {"topology": {"layers": [{"name": "rack", "label": "x/rack"}, {"name": "nvlink", "label": "x/nvlink"}]}},
}


def a_pod(name: str, role: str, node: str = "", phase: str = "Running", **domains: str) -> JsonObject:
    """Return a pod as the operator has stamped it."""
    annotations = {"unbroken.dev/topology": json.dumps(domains)} if domains else {}
    metadata = {"name": name, "labels": {"unbroken.dev/role": role}, "annotations": annotations}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}


def test_pods_are_shown_below_their_domains_with_counts_for_each() -> None:
    ending = a_pod("digits-1", "active", "node-b", rack="r1", nvlink="n2")
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pods = [
        a_pod("digits-10", "active", "node-a", rack="r1", nvlink="n1"),
        a_pod("digits-2", "active", "node-a", rack="r1", nvlink="n1"),
        ending,
        a_pod("digits-3", "spare", "node-c", rack="r2"),
        a_pod("digits-4", "spare", phase="Pending"),
    ]
    assert tree_lines(tree_from_objects(JOB, pods)) == [
        "digits in namespace ml: 2 active, 1 spare, 2 not running",
        "  rack r1               2 active, 0 spare, 1 not running",
        "    nvlink n1           2 active, 0 spare",
        "      digits-2          active  Running   node-a",
        "      digits-10         active  Running   node-a",
        "    nvlink n2           0 active, 0 spare, 1 not running",
        "      digits-1          active  ending    node-b",
        "  rack r2               0 active, 1 spare",
        "    nvlink (not known)  0 active, 1 spare",
        "      digits-3          spare   Running   node-c",
        "  rack (not known)      0 active, 0 spare, 1 not running",
        "    nvlink (not known)  0 active, 0 spare, 1 not running",
        "      digits-4          spare   Pending",
    ]


def test_a_job_without_layers_or_pods_and_an_unreadable_annotation_are_shown() -> None:
    bare: JsonObject = {"metadata": JOB["metadata"]}
    assert tree_lines(tree_from_objects(bare, [])) == [
        "digits in namespace ml: 0 active, 0 spare",
        "  no training pods",
    ]
    pod = a_pod("digits-0", "active", "node-a")
    pod["metadata"]["annotations"] = {"unbroken.dev/topology": "[1]"}
    (place,) = tree_from_objects(JOB, [pod]).places
    assert place == PodPlace("digits-0", "active", "Running", "node-a", ("(not known)", "(not known)"), None)
    assert tree_lines(tree_from_objects(bare, [pod]))[1] == "  digits-0  active  Running   node-a"


def test_the_rendezvous_tells_ranks_too() -> None:
    def member(pod: str, role: Role, ranks: tuple[int, ...], is_connected: bool = True) -> PodStatus:
        return PodStatus(pod, "uid", "node-a", role, ranks, ("r1",), (WorkerPhase.RUNNING,), is_connected)

    status = JobStatus(
        protocol=PROTOCOL,
        job="digits",
        term=1,
        revision=1,
        phase=JobPhase.RUNNING,
        reason=Reason.TRAINING,
        message="",
        iteration=0,
        world_size=5,
        spare_ranks=0,
        lost_ranks=0,
        pods=(
            member("digits-0", Role.ACTIVE, (0, 1, 2, 7)),
            member("digits-1", Role.SPARE, ()),
            member("digits-2", Role.ACTIVE, (3,), is_connected=False),
        ),
        restarts_by_rung={},
        restarts_by_cause={},
        recoveries=(),
        max_step=-1,
        ettr=None,
    )
    assert tree_lines(tree_from_status(status)) == [
        "digits: 1 active, 1 spare, 1 not running",
        "  r1          1 active, 1 spare, 1 not running",
        "    digits-0  active  Running   node-a  ranks 0-2, 7",
        "    digits-2  active  not connected  node-a  rank 3",
        "    digits-1  spare   Running   node-a",
    ]
