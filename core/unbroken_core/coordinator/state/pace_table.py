"""How busy the workers of the iteration in force are, and which of them hold the others up."""

from dataclasses import dataclass, field

from unbroken_core.protocol.messages import Pace
from unbroken_core.ranks.worlds import Worker
from unbroken_core.recovery.stragglers import Slow


@dataclass
class PaceTable:
    """One job's. What is known of a window is dropped with it, who is a straggler stays until it is shown otherwise."""

    iteration: int = -1
    window: int = -1
    """The newest one that a worker has told."""
    told: dict[Worker, Pace] = field(default_factory=dict)
    """Who has told it."""
    is_judged: bool = True
    """Whether the present window was; before the first there is nothing to be judged."""
    judged: int = -1
    """The last of them."""
    slow: dict[Worker, Slow] = field(default_factory=dict)
    """Who was slow in that."""
    measured: frozenset[Worker] = frozenset()
    """Who had told it."""
    stragglers: dict[Worker, Slow] = field(default_factory=dict)
    """With the newest figures of each."""
    moved: dict[int, str] = field(default_factory=dict)
    """Ranks that were moved for it, and from which pod: if they are slow on another one, it is not for the pod."""
    taken_over: tuple[int, float] = (-1, 0.0)
    """An iteration that was taken over, and since when it runs: its workers go on counting windows from then."""

    def since_s(self, iteration: int, running_s: float) -> float:
        """Return since when workers count the windows of an iteration that this coordinator sees run since then."""
        taken_over, began_s = self.taken_over
        return min(began_s, running_s) if taken_over == iteration else running_s

    def begin(self, iteration: int) -> None:
        """Begin an iteration: windows are counted anew."""
        self.iteration, self.window, self.judged = iteration, -1, -1
        self.told, self.slow, self.measured, self.is_judged = {}, {}, frozenset(), True

    def begin_window(self, window: int) -> None:
        """Begin a window."""
        self.window, self.told, self.is_judged = window, {}, False

    def judge(self, slow: dict[Worker, Slow]) -> bool:
        """Note who was slow in the present window; return whether stragglers have come, gone or changed."""
        before, self.stragglers = self.stragglers, dict(self.stragglers)
        measured = frozenset(self.told)
        if self.judged == self.window - 1 >= 0:
            self.stragglers.update({worker: found for worker, found in slow.items() if worker in self.slow})
            for worker in measured & self.measured:
                if worker not in slow and worker not in self.slow:
                    self.stragglers.pop(worker, None)
        self.judged, self.slow, self.measured, self.is_judged = self.window, slow, measured, True
        return self.stragglers != before

    def forget(self, uid: str) -> bool:
        """Drop what is known of a pod; return whether it had stragglers."""
        gone = [worker for worker in self.stragglers if worker[0] == uid]
        for worker in gone:
            del self.stragglers[worker]
        return bool(gone)
