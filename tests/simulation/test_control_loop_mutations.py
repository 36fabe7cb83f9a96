"""The checks of the control loop find a broken operator: each of these breaks is seen within a few schedules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.simulation.control_loop.loop_runner import LoopResult, run_loop_seed
from tests.simulation.control_loop.loop_schedule import make_loop_schedule

from unbroken_core.protocol.messages import Earlier
from unbroken_operator import worker
from unbroken_operator.adapters import executor
from unbroken_operator.adapters.lease import Lease
from unbroken_operator.adapters.stores import PodStore
from unbroken_operator.decisions import assessment, snapshot
from unbroken_operator.decisions import plan as planning
from unbroken_operator.decisions.actions import Decision
from unbroken_operator.decisions.memory import JobMemory
from unbroken_operator.decisions.objects import successor
from unbroken_operator.decisions.reporting import status
from unbroken_operator.decisions.snapshot import Snapshot

MOST_SCHEDULES = 25
Patch = pytest.MonkeyPatch


def write_after_the_lease_is_lost(patch: Patch) -> None:
    patch.setattr(Lease, "may_act", property(lambda _self: True))


def believe_the_node_alone(patch: Patch) -> None:
    """A pod on a node that is not ready is lost, though its agent is connected."""

    def is_lost(pod: Any, seen: Snapshot, _members: Any) -> bool:
        node = seen.nodes.get(pod.node)
        return bool(pod.node) and not pod.is_terminal and (node is None or not node.is_ready)

    patch.setattr(assessment, "_is_lost", is_lost)


def call_all_pods_accounted_for(patch: Patch) -> None:
    patch.setattr(assessment, "_is_accounted", lambda _snapshot: True)


def take_a_deletion_for_the_end(patch: Patch) -> None:
    """A pod that is told to end has ended."""
    patch.setattr(snapshot, "_has_ended", lambda item: bool(item["metadata"].get("deletionTimestamp")))


def reserve_no_ordinals(patch: Patch) -> None:
    plain = status.status_patch

    def without(*given: Any) -> dict[str, Any]:
        return {key: value for key, value in plain(*given).items() if key != "nextPodOrdinal"}

    patch.setattr(planning, "status_patch", without)


def begin_each_rendezvous_at_nothing(patch: Patch) -> None:
    patch.setattr(planning, "earlier", lambda *_given: Earlier())


def lead_before_the_other_has_ended(patch: Patch) -> None:
    patch.setattr(successor, "_end_wait_s", lambda *_given: 0.0)


def count_pods_that_failed(patch: Patch) -> None:
    plain = assessment._counts

    def counts(pod: Any, *given: Any, **named: Any) -> bool:
        return plain(replace(pod, phase="Running") if pod.phase == "Failed" else pod, *given, **named)

    patch.setattr(assessment, "_counts", counts)


def never_forget_a_pod(patch: Patch) -> None:
    """The watch says that a pod is gone, and the operator goes on to see it."""
    patch.setattr(PodStore, "remove", lambda _self, _item: None)
    patch.setattr(
        PodStore,
        "replace",
        lambda self, items, _version, mark=0, _namespace=None: [self._take(item, mark) for item in items],
    )


def delete_what_bears_the_label(patch: Patch) -> None:
    """Whoever bears the job's label is the job's."""
    patch.setattr(
        Snapshot, "_owned", lambda self, component: tuple(pod for pod in self.pods if pod.component == component)
    )


def forget_which_ordinals_were_tried(patch: Patch) -> None:
    """What was asked for and not answered is free again."""
    patch.setattr(
        JobMemory,
        "note_tried",
        lambda self, planned, _tried: setattr(self, "unused_ordinals", self.unused_ordinals | frozenset(planned)),
    )


def overwrite_what_was_reserved_since(patch: Patch) -> None:
    patch.setattr(executor, "_ORDINALS", frozenset())


def stop_once_the_job_runs(patch: Patch) -> None:
    plain = planning.plan

    def plan(seen: Snapshot) -> Decision:
        return Decision(()) if seen.status.get("state") == "Running" else plain(seen)

    patch.setattr(worker, "plan", plan)


def delete_no_pods(patch: Patch) -> None:
    """Neither those that count as lost, which may come back, nor those that are too many."""
    patch.setattr(planning, "_deletions", lambda *_given: iter(()))


BREAKS: dict[Callable[[Patch], None], tuple[str, int]] = {
    write_after_the_lease_is_lost: ("operator pauses", 226),
    believe_the_node_alone: ("partition", 688),
    call_all_pods_accounted_for: ("partition", 84),
    take_a_deletion_for_the_end: ("delete pod", 0),
    reserve_no_ordinals: ("lose pod", 0),
    begin_each_rendezvous_at_nothing: ("delete rendezvous", 0),
    lead_before_the_other_has_ended: ("cordon", 0),
    count_pods_that_failed: ("lose pod", 0),
    never_forget_a_pod: ("delete pod by force", 0),
    delete_what_bears_the_label: ("delete pod", 0),
    forget_which_ordinals_were_tried: ("lost answer", 148),
    overwrite_what_was_reserved_since: ("late write", 426),
    stop_once_the_job_runs: ("lose pod", 55),
    delete_no_pods: ("partition", 84),
}
"""What strikes often in the schedules that are searched, and the seed to begin with."""

FOUND_BY: dict[Callable[[Patch], None], str] = {
    stop_once_the_job_runs: "the status says Running",
    delete_no_pods: "are wanted",
}
"""Words of the check that is to find it, where no other break needs that check."""


def seeds_with(kind: str, first: int) -> Iterator[int]:
    """Yield the seeds whose schedules strike so often in this way, which a break needs in order to be seen."""
    for seed in itertools.count(first):
        if seed == first > 0 or sum(fault.text == f"** {kind}" for fault in make_loop_schedule(seed).job.faults) >= 6:
            yield seed


def found(break_it: Callable[[Patch], None], patch: Patch) -> LoopResult | None:
    """Return the first violation after a break."""
    seeds = itertools.islice(seeds_with(*BREAKS[break_it]), MOST_SCHEDULES)
    break_it(patch)
    return next((result for result in map(run_loop_seed, seeds) if result.failure), None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda one: one.__name__)
def test_a_broken_operator_is_found(break_it: Callable[[Patch], None], monkeypatch: Patch) -> None:
    result = found(break_it, monkeypatch)
    assert result is not None
    assert result.failure.startswith("Violation"), result.failure
    assert FOUND_BY.get(break_it, "") in result.failure
