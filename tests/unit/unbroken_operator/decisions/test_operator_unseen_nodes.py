"""A pod may be known to be on a node of which the watch of nodes has yet to tell."""

import dataclasses

import pytest
from tests.unit.unbroken_operator.operator_world import a_node, running_world

from unbroken_operator.adapters.stores import NodeStore
from unbroken_operator.decisions.actions import DeletePod
from unbroken_operator.decisions.admission import ValidSpec, admit
from unbroken_operator.decisions.assessment import assess, observation
from unbroken_operator.decisions.memory import UNSEEN_S, JobMemory
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.snapshot import Snapshot


def _with_pod_on(node: str, **fields: object) -> Snapshot:
    """Return the snapshot of a job that trains, of which one pod is new, and on a node that is not known."""
    world = running_world()
    world.pods["digits-2"]["spec"]["nodeName"] = node
    world.rendezvous_says(world.report.phase, ["digits-0", "digits-1"], []) if world.report else None
    return dataclasses.replace(world.snapshot(), **fields)  # type: ignore[arg-type] # each test knows its own


@pytest.mark.parametrize("is_unseen", [True, False], ids=["not told of yet", "gone"])
def test_a_pod_on_a_node_that_was_not_told_of_yet_is_neither_lost_nor_said_to_have_ended(is_unseen: bool) -> None:
    unseen = frozenset(["new"]) if is_unseen else frozenset()
    snapshot = _with_pod_on("new", unseen_nodes=unseen)
    deleted = [action.name for action in plan(snapshot).actions if isinstance(action, DeletePod)]
    assert deleted == ([] if is_unseen else ["digits-2"])
    verdict = admit(snapshot.job)
    assert isinstance(verdict, ValidSpec)
    seen = observation(snapshot, assess(snapshot, verdict), verdict.settings)
    assert [pod.is_ended for pod in seen.pods.values()] == [False, False, not is_unseen]


def test_a_node_that_was_there_and_went_is_gone_and_one_that_never_was_is_not_known() -> None:
    told: list[str] = []
    store = NodeStore(told.append)
    store.upsert(a_node("old"))
    store.upsert(a_node("older"))
    assert store.unseen(["old", "older", "new"]) == {"new"}
    store.remove(a_node("old"))
    store.replace([], "9")
    assert store.unseen(["old", "older", "new"]) == {"new"}
    assert told == ["old", "older", "old", "older"]
    store.upsert(a_node("new"))
    assert store.unseen(["old", "new"]) == frozenset()


def test_a_node_that_nobody_tells_of_for_minutes_is_gone() -> None:
    """It went before this operator began to look."""
    memory = JobMemory()
    assert memory.note_unseen(frozenset(["a"]), 10.0) == {"a"}
    assert memory.note_unseen(frozenset(["a", "b"]), 10.0 + UNSEEN_S) == {"b"}
    assert memory.note_unseen(frozenset(), 20.0 + UNSEEN_S) == frozenset()
    assert memory.note_unseen(frozenset(["a"]), 30.0 + UNSEEN_S) == {"a"}
