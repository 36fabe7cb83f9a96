"""Steps of the training function in virtual time, as far as they matter: while a worker may have to halt after one.

A step has a collective: a worker finishes step n only when all workers of its iteration have begun it, that is, have
come out of their ping after step n - 1. Before the first order of an iteration, and once all were let go on, nobody
looks: where the workers are then follows from the time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unbroken_core.coordinator.state.job import MAX_ALONE
from unbroken_core.protocol.messages import NO_STEP, Halt, Halted, Plan
from unbroken_core.protocol.settings import DEFAULT_RUNGS, HealthMode
from unbroken_core.vocabulary.reasons import WorkerPhase

if TYPE_CHECKING:
    from tests.simulation.pod import Pod, Worker
    from tests.simulation.world import World

RETRY_S = 0.2
MOST_RAISES = 8
"""Of a pod that fails each time; more would end the job for want of progress, where nobody can take its ranks."""


class Training:
    """Where each worker is."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random.Random(f"training {world.schedule.seed}")
        self.step_s = world.schedule.step_s
        self.began_s: dict[int, float] = {}
        """When all workers of an iteration had entered."""
        self.known: dict[int, float] = {}
        """When the workers of an iteration got a position."""

    def obey(self, pod: Pod, worker: Worker, order: Halt) -> None:
        """A worker hears how far to go, and says where it is."""
        self._place_all(order.iteration)
        worker.order, worker.halt_until_s = order, self.world.now_s + order.within_s
        if worker.is_held:
            self._stand_or_go(pod, worker)
        else:
            self._say(pod, worker, is_held=False)
        self._try_later(pod, worker)
        self.world.after(order.within_s, lambda: self._give_up(pod, worker, order), "")

    def _place_all(self, iteration: int) -> None:
        if iteration in self.known:
            self._go_on_all(iteration)
            return
        self.known[iteration] = self.world.now_s
        self.world.steps.end(iteration)  # From now on steps are made here, one by one, and not told.
        ran_s = self.world.now_s - self.began_s.get(iteration, self.world.now_s)
        finished = int(ran_s / self.step_s) - 1
        for _pod, worker in self.world.entries.get(iteration, {}).values():
            # Some have passed the ping that others are about to come to.
            worker.step = max(finished + self.random.choice([0, 0, 1]), -1)

    def _go_on_all(self, iteration: int) -> None:
        """Make the steps that all have made since the last of them was let go on, if they were."""
        peers = list(self.world.entries.get(iteration, {}).values())
        if len(peers) != self.world.world_sizes.get(iteration):
            return
        since_s = self.began_s.get(iteration, self.world.now_s)
        for pod, worker in peers:
            free_s = self._free_since_s(worker, self.known[iteration])
            if free_s is None or not self._is_in(pod, worker, iteration):
                return
            since_s = max(since_s, free_s)
        finished = min(worker.step for _pod, worker in peers) + int((self.world.now_s - since_s) / self.step_s)
        for _pod, worker in peers:
            worker.step = max(worker.step, finished + self.random.choice([0, 0, 1]))

    def _free_since_s(self, worker: Worker, known_s: float) -> float | None:
        """Return since when no order holds a worker up; None while one may."""
        order = worker.order
        if order is None:
            return known_s
        if worker.is_held:
            return None
        if order.step == NO_STEP:
            return worker.halt_until_s - order.within_s
        return worker.halt_until_s if self.world.now_s >= worker.halt_until_s else None

    def _told(self, worker: Worker, step: int) -> int:
        """Return the number that the script tells for this step; -1: none."""
        kind = self.world.schedule.tells_steps
        if kind == "none" or (kind == "rank 0" and worker.rank != 0) or step < 0:
            return -1
        if kind == "epochs":
            return step % 7
        return step + 1 if kind == "skewed" and worker.rank == 0 else step

    def _say(self, pod: Pod, worker: Worker, is_held: bool, is_done: bool = False) -> None:
        order = worker.order
        if order is not None:
            told = self._told(worker, worker.step)
            worker.halted = Halted(order.term, order.number, told, is_held, is_done)
            pod.report()

    def _is_in(self, pod: Pod, worker: Worker, iteration: int) -> bool:
        is_running = worker.phase is WorkerPhase.RUNNING and worker.iteration == iteration
        return pod.is_alive and is_running and not worker.is_hung

    def _try_later(self, pod: Pod, worker: Worker) -> None:
        order = worker.order
        if order is not None and not worker.is_stepping:
            worker.is_stepping = True
            delay_s = self.random.uniform(0.01, self.step_s)
            self.world.after(delay_s, lambda: self._step(pod, worker, order.iteration), "")

    def _step(self, pod: Pod, worker: Worker, iteration: int) -> None:
        """Come to the next ping, if all others are in this step."""
        worker.is_stepping = False
        order = worker.order
        if order is not None and order.iteration != iteration:
            self._try_later(pod, worker)  # It was to step in an iteration that is over.
            return
        if order is None or worker.is_held or not self._is_in(pod, worker, iteration):
            return
        if order.step == NO_STEP or self.world.now_s >= worker.halt_until_s:
            return
        peers = self.world.entries.get(iteration, {}).values()
        has_begun = all(
            self._is_in(other, peer, iteration)
            and (peer.step > worker.step or (peer.step == worker.step and not peer.is_held))
            for other, peer in peers
        )
        if has_begun and len(peers) == self.world.world_sizes.get(iteration):
            before = self._told(worker, worker.step)
            worker.step += 1
            told = self._told(worker, worker.step)
            worker.has_gone_back = worker.has_gone_back or told < before
            if told >= 0 and (told >= order.step or worker.has_gone_back):
                worker.is_held = True
                self._stand_or_go(pod, worker)
                return
        self._try_later(pod, worker)

    def _stand_or_go(self, pod: Pod, worker: Worker) -> None:
        order = worker.order
        if order is None:
            return
        told = self._told(worker, worker.step)
        if order.step == NO_STEP or not (told >= order.step or worker.has_gone_back):
            worker.is_held = False
            self._say(pod, worker, is_held=False)
            return
        self._say(pod, worker, is_held=True)
        if order.is_common and order.step == told:
            iteration, number = worker.iteration, order.number

            def save() -> None:
                is_same = worker.order is not None and worker.order.number == number and worker.is_held
                if is_same and self._is_in(pod, worker, iteration):
                    worker.saved = worker.step
                    self._say(pod, worker, is_held=True, is_done=True)

            self.world.after(self.random.choice([0.001, 0.5, 5.0]), save, "")

    def _give_up(self, pod: Pod, worker: Worker, order: Halt) -> None:
        """Nobody waits longer than the order says."""
        if worker.order is order and worker.is_held and self._is_in(pod, worker, order.iteration):
            worker.is_held = False
            self._say(pod, worker, is_held=False)


class FailingPodError(AssertionError):
    """A pod that alone fails each time keeps its ranks, though others could take them."""


class FailingPod:
    """A pod on which the training function raises each time, before its first step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random.Random(f"failing pod {world.schedule.seed}")
        self.uid = ""
        """Of that pod; "": there is none."""
        self.num_raised = 0
        self._in_a_row = 0
        """Of these, with no other fault between them."""
        self._raised_s = 0.0
        self._num_active = 0
        """Pods with ranks in the newest plan, as far as it was sent."""
        self.num_left_out = 0
        """Plans that give its ranks to others, once it has failed so often that they should."""

    def begin(self, pod: Pod) -> None:
        """From now on it raises."""
        self.uid = pod.uid
        for worker in pod.workers:
            self.entered(pod, worker)

    def entered(self, pod: Pod, worker: Worker) -> None:
        """A worker enters the training function."""
        if pod.uid != self.uid or worker.local_rank != 0:
            return
        if self.num_raised >= MOST_RAISES:
            self._in_a_row = 0  # It has failed for the last time.
        else:
            iteration, delay_s = worker.iteration, self.random.choice([0.0, 0.001, 0.02])
            self.world.after(delay_s, lambda: self._raise(pod, worker, iteration), "")

    def check_cut(self, plan_of: Mapping[str, Plan]) -> None:
        """Look whether a new plan, by uid, leaves it out."""
        plan, num_before = plan_of.get(self.uid), self._num_active
        if plan_of:
            self._num_active = sum(any(part.rank is not None for part in each.ranks) for each in plan_of.values())
        if plan is None or self._in_a_row < MAX_ALONE:
            return
        if all(part.rank is None for part in plan.ranks):
            self.num_left_out += 1
            return
        coordinator, settings = self.world.coordinator, self.world.settings
        assert coordinator is not None
        members, pods = coordinator._job.members, self.world.pods
        unused = [uid for uid in members.ready if uid in plan_of and uid not in members.active]
        is_free = settings.rungs == DEFAULT_RUNGS and not settings.layers and self.world.schedule.policy is None
        is_free = is_free and settings.max_faults_per_rank is None and settings.health is not HealthMode.ACT
        # With fewer ranks than pods, one without ranks counts for minReplicas: then no spare comes before another.
        is_free = is_free and len(members.ready) > settings.minimum_replicas
        sound = [uid for uid in unused if pods[uid].is_alive and uid not in self.world.guilty_pods]
        # Another fault may have ended the first of these plans. Of one pod alone nobody knows whether others do better.
        is_free = is_free and self._in_a_row > MAX_ALONE and min(num_before, len(members.active)) > 1
        if is_free and sound and self.world.disturbed_s <= self._raised_s:
            raise FailingPodError(
                f"{pods[self.uid].name} failed {self._in_a_row} times alone, and {sound} have no rank"
            )

    def _raise(self, pod: Pod, worker: Worker, iteration: int) -> None:
        if worker.iteration == iteration and pod.is_alive and worker.phase is WorkerPhase.RUNNING:
            is_alone = self.world.disturbed_s <= self._raised_s
            self.num_raised, self._raised_s = self.num_raised + 1, self.world.now_s
            self._in_a_row = self._in_a_row + 1 if is_alone else 1
            self.world.note_guilt(pod, worker, "raises as each time")
            pod.raise_exception(worker, "RuntimeError: this pod cannot")
