"""Steps that scripts tell with ping(step=): loading first, then one after the other until the iteration breaks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from unbroken_core.vocabulary.reasons import WorkerPhase

if TYPE_CHECKING:
    from tests.simulation.pod import Pod, Worker
    from tests.simulation.world import World

DELAY_S = 0.01
"""Longer than a message takes."""


class StepsError(AssertionError):
    """The account has other steps than were made."""


@dataclass
class Run:
    """One iteration."""

    began_s: float
    """When it had loaded, and began with its first step."""
    restored: int
    """The step from which it goes on."""
    workers: tuple[Worker, ...]
    ended_s: float = math.inf


class Steps:
    """Ground truth."""

    def __init__(self, world: World) -> None:
        self.world = world
        chance = random.Random(f"steps {world.schedule.seed}")
        self.is_on = chance.random() < 0.5
        self.load_s = chance.choice([0.0, 0.7, 20.0, 90.0])
        self.step_s = chance.choice([0.05, 0.5, 2.0])
        self.saves_every = chance.choice([1, 10])
        self.highest = 0
        """The last step that any iteration has made."""
        self.runs: dict[int, Run] = {}
        self.num_runs = 0

    def begin(self, iteration: int) -> None:
        """All workers of an iteration have entered."""
        if not self.is_on:
            return
        self._end_all()
        entries = self.world.entries[iteration].values()
        restored = self.highest // self.saves_every * self.saves_every
        began_s = self.world.now_s + self.load_s
        self.runs[iteration] = run = Run(began_s, restored, tuple(worker for _pod, worker in entries))
        self.num_runs += 1
        for pod in {pod.uid: pod for pod, _worker in entries}.values():
            # The first step is told at once.
            self.world.after(began_s + self.step_s + 1e-6 - self.world.now_s, partial(self._tell, pod, run), "")

    @staticmethod
    def _tell(pod: Pod, run: Run) -> None:
        if any(worker in run.workers and worker.phase is WorkerPhase.RUNNING for worker in pod.workers):
            pod.report()

    def end(self, iteration: int) -> None:
        """No more steps are made in an iteration."""
        run = self.runs.get(iteration)
        if run is not None and run.ended_s == math.inf:
            run.ended_s = self.world.now_s
            self.highest = max(self.highest, run.restored + self._num_made(run))

    def _end_all(self) -> None:
        for iteration in self.runs:
            self.end(iteration)

    def _num_made(self, run: Run) -> int:
        return max(int((min(self.world.now_s, run.ended_s) - run.began_s) / self.step_s), 0)

    def _run_of(self, worker: Worker) -> Run | None:
        run = self.runs.get(worker.iteration)
        return run if run is not None and worker in run.workers else None

    def step_of(self, worker: Worker) -> int:
        """Return the step that a worker's slot shows; -1: none in its iteration."""
        run = self._run_of(worker)
        made = 0 if run is None else self._num_made(run)
        return -1 if run is None or not made else run.restored + made

    def ago_s(self, pod: Pod) -> float:
        """Return for how long the newest step of a pod's newest iteration has been made, as its agent tells it."""
        newest = max(worker.iteration for worker in pod.workers)
        for worker in pod.workers:
            run = self._run_of(worker)
            if run is not None and worker.iteration == newest and self._num_made(run):
                return max(self.world.now_s - run.began_s - self._num_made(run) * self.step_s, 0.0)
        return 0.0

    def check(self) -> None:
        """No second counts as progress in which no step was made, none twice, and no time of loading."""
        world = self.world
        coordinator = world.coordinator
        # A rendezvous that takes an iteration over takes what was before for progress.
        if not self.is_on or coordinator is None or world.epoch or coordinator.term > 1 or not self.runs:
            return
        account = coordinator.progress.account
        spent = account.spent(world.now_s)
        if spent is None or account._taken is not None or coordinator.progress.max_step < 0:
            return
        made = max(self.highest, *(run.restored + self._num_made(run) for run in self.runs.values()))
        most_s = made * (self.step_s + DELAY_S) + self.num_runs * self.step_s / 10 + DELAY_S
        if spent.progress_s > most_s:
            raise StepsError(f"{made} steps of {self.step_s} s, and {spent.progress_s} s of progress")

    def check_end(self) -> None:
        """A run without a fault has loaded once, and then made steps."""
        world = self.world
        coordinator = world.coordinator
        spent = None if coordinator is None else coordinator.progress.account.spent(world.now_s)
        is_calm = not world.num_faults and self.num_runs == 1 and not world.stalls.stall_s and not world.training.known
        if not self.is_on or spent is None or not is_calm or self.highest < 2 or world.ledger.num_recoveries:
            return
        # Of which all but the last pod may have entered before the rendezvous knew it, or it a moment later.
        wanted_s = (self.load_s, self.highest * self.step_s)
        if any(
            abs(got_s - want_s) > 0.1
            for got_s, want_s in zip((spent.restart_s, spent.progress_s), wanted_s, strict=True)
        ):
            raise StepsError(f"loading and steps: want {wanted_s} s of a calm run, got {spent}")
