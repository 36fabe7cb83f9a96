"""Pods that are made and deleted in circles become rare, whatever the cause; what only looks like it is not slowed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_job

from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import DeletePod
from unbroken_operator.decisions.circles import NUM_FREE
from unbroken_operator.decisions.memory import JobMemory

Meddle = Callable[[World], None]


class Clocked:
    """A world whose operator remembers, with a clock that moves by hand."""

    def __init__(self, **spec: Any) -> None:
        self.world = World(a_job(**spec))
        self.memory = JobMemory()
        self.now_s = 1000.0

    def step(self, meddle: Meddle = lambda _world: None) -> None:
        """Plan and act once, as the worker does; then somebody meddles, and 0.1 s pass, or 3 s if nothing happened."""
        self._look()
        known = set(self.world.created)
        actions = self.world.actions()
        for action in actions:
            self.world.apply(action)
            if isinstance(action, DeletePod):
                self.memory.note_deleted(action.uid, action.why)
        for name in set(self.world.created) - known:
            self.memory.note_created(self.world.uid_of(name), self.now_s)
        meddle(self.world)
        self.now_s += 0.1 if actions else 3.0

    def run(self, for_s: float, meddle: Meddle = lambda _world: None) -> int:
        """Step for so long; return how many pods were created."""
        before, end_s = len(self.world.created), self.now_s + for_s
        while self.now_s < end_s:
            self.step(meddle)
        return len(self.world.created) - before

    def _look(self) -> None:
        snapshot = self.world.snapshot()
        self.memory.update((*snapshot.trainers(), *snapshot.rendezvous_pods()), None, is_over=False, now_s=self.now_s)
        self.world.memory = dataclasses.replace(self.memory.view(self.now_s), posted=self.world.memory.posted)


def annotate(component: str, key: str) -> Meddle:
    """Return a mutating webhook that puts an annotation on all pods of a component."""

    def meddle(world: World) -> None:
        for name in world.names(component):
            world.pods[name]["metadata"]["annotations"][key] = "x"

    return meddle


def delete_all(world: World) -> None:
    """Be a policy that deletes every pod at once."""
    for name in list(world.pods):
        world.remove_pod(name)


def start(world: World) -> None:
    """Be a kubelet."""
    world.run_pods()
    for name in list(world.pods):
        if "deletionTimestamp" in world.pods[name]["metadata"]:
            world.remove_pod(name)


@pytest.mark.parametrize(
    "meddle",
    [
        pytest.param(annotate(layout.TRAINER, layout.AVOIDS_ANNOTATION), id="the operator deletes them for a reason"),
        pytest.param(annotate(layout.RENDEZVOUS, layout.SETTINGS_ANNOTATION), id="rendezvous with other settings"),
        pytest.param(delete_all, id="somebody else deletes them before the operator looks"),
    ],
)
def test_a_circle_backs_off_says_so_and_is_over_when_it_calms(meddle: Meddle) -> None:
    """Without a budget, the first two minutes alone bring up to 1,200 rounds."""
    made = Clocked()
    assert made.run(120.0, meddle) <= 4 * (NUM_FREE + 5)
    assert made.world.condition("PodsReady") == ("False", "PodCreationBackOff")
    (message,) = [item["message"] for item in made.world.job["status"]["conditions"] if item["type"] == "PodsReady"]
    assert "times in a row they went before they were of use, last" in message
    assert made.run(1200.0, meddle) <= 4 * 6, "every five minutes at last"
    assert made.world.num_status_writes < 100
    made.run(301.0)
    made.run(61.0, start)
    assert made.world.condition("PodsReady") == ("True", "PodsReady")
    assert made.memory.circles.num_rounds == 0
    made.world.remove_pod(made.world.names()[0])
    assert made.run(0.3, start) == 1, "a fault after that is repaired at once"


def test_a_new_spec_is_tried_within_seconds() -> None:
    made = Clocked()
    made.run(200.0, delete_all)
    assert made.run(20.0, delete_all) == 0
    made.memory.note_new_spec()
    assert made.run(8.5) == 4


def test_a_large_job_starts_rolls_out_and_loses_its_nodes_without_a_pause() -> None:
    made = Clocked(replicas=60)
    assert made.run(0.3) == 62
    made.world.job["spec"]["template"]["spec"]["containers"][0]["image"] = "torch:3"
    assert made.run(0.5) == 61, "all wait, and are made anew"
    made.run(0.3, start)
    for _ in range(40):
        for name in made.world.names()[:20]:
            made.world.remove_pod(name)
        assert made.run(0.3, start) == 20, "what was ready and is lost is replaced, however often"
    assert made.memory.circles.num_rounds < NUM_FREE


def test_pods_that_wait_and_are_deleted_one_by_one_are_one_round() -> None:
    made = Clocked(replicas=60)
    made.run(0.3)
    for name in made.world.names():
        made.world.remove_pod(name)
        made.run(1.0)
    assert made.memory.circles.num_rounds == 1
    assert len(made.world.names()) == 61
