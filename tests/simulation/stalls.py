"""Checkpoints for which training stands still: every few seconds, in some pods longer than in others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unbroken_core.vocabulary.reasons import WorkerPhase

if TYPE_CHECKING:
    from tests.simulation.pod import Pod
    from tests.simulation.world import World

EVERY_S = 3.0


class StallError(AssertionError):
    """The account has other checkpoints than there were."""


class Stalls:
    """Ground truth."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stall_s = world.schedule.stall_s
        self.longest: dict[int, float] = {}
        """By iteration, the longest that any of its pods has told."""
        self._by_pod: dict[str, tuple[int, float]] = {}

    def told_by(self, pod: Pod) -> float:
        """Return for how long the newest iteration of a pod's workers has stood still, as its agent tells it."""
        newest = max(worker.iteration for worker in pod.workers)
        began_s = self.world.training.began_s.get(newest)
        is_in = any(worker.phase is WorkerPhase.RUNNING and worker.iteration == newest for worker in pod.workers)
        if self.stall_s and is_in and began_s is not None:
            length_s = self.stall_s * (0.5 if pod.name.endswith(("1", "3", "5", "7", "9")) else 1.0)
            self._by_pod[pod.uid] = newest, int((self.world.now_s - began_s) / EVERY_S) * length_s
        iteration, seconds = self._by_pod.get(pod.uid, (-1, 0.0))
        if iteration != newest or not seconds:
            return 0.0
        self.longest[newest] = max(self.longest.get(newest, 0.0), seconds)
        return seconds

    def check(self) -> None:
        """No second counts that nobody stood still, and none twice; in a calm run, all count."""
        coordinator = self.world.coordinator
        spent = None if coordinator is None else coordinator.progress.account.spent(self.world.now_s)
        if spent is None:
            return
        most_s = sum(self.longest.values())
        if spent.checkpoint_s > most_s + 1e-6:
            raise StallError(f"checkpoint: want at most {most_s} s, got {spent.checkpoint_s}")

    def check_end(self) -> None:
        """In a run without a fault, the account has all that was told."""
        coordinator = self.world.coordinator
        spent = None if coordinator is None else coordinator.progress.account.spent(self.world.now_s)
        # Steps are not held up here, as they would be.
        is_calm = not self.world.num_faults and len(self.longest) == 1 and not self.world.steps.is_on
        if spent is None or not is_calm or self.world.ledger.num_recoveries or self.world.ledger.num_common:
            return
        told_s = sum(self.longest.values())
        if abs(spent.checkpoint_s - told_s) > 1e-6:
            raise StallError(f"checkpoint: want {told_s} s of a calm run, got {spent.checkpoint_s}")
