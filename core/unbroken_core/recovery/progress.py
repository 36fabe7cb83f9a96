"""How much of the time was progress. All times are seconds of the coordinator's clock."""

import math
from dataclasses import replace
from typing import NamedTuple

from unbroken_core.protocol.messages import EarlierRun, TimeSpent
from unbroken_core.recovery.account import Account, wall_of
from unbroken_core.recovery.step_pace import StepPace
from unbroken_core.vocabulary.reasons import Spent

STEADY_RUN_S = 60.0
"""Where a script reports no steps, an iteration that ran for so long counts as progress."""


class _First(NamedTuple):
    """The first report of an iteration, while nobody knows yet how long a step takes."""

    at_s: float
    steps: int
    """How many steps ended with it."""
    term: Spent


class Progress:
    """Effective training time ratio: seconds of first-time progress / wall seconds since the job first ran.

    Where the script reports steps (ping(step=)), a stretch counts when it ends with a step that the job reached for the
    first time. It begins with the step before in the same iteration. What a worker does before its first step (it
    builds the model, and loads its state) is a part of the restart: of the stretch from when all workers had entered to
    the first report, only the last counts, as long as a step takes; the next report says how long that is where none
    was known. Steps that a restart repeats do not count, nor their share of a stretch that ends with a new one; neither
    does the time between the last new step and a fault. Without steps, all running time counts. Of all these stretches,
    what workers stood still for checkpoints does not count: the longest that one of them tells, of a whole iteration.

    What does not count is lost, for each active rank of the iteration, or of the one before while none runs.

    A new coordinator counts the iteration that it takes over as progress, from when its pods entered it until the loss
    if there was one. Of what was before, the operator tells it (`Earlier`): that counts in the ratio alone, since
    counters of this process must not jump.
    """

    def __init__(self) -> None:
        self.max_step = -1
        self._iteration_step = -1
        self._adopted = (-1, -1)
        """An iteration that was taken over, and its last step by then."""
        self._pace = StepPace()
        self._step_s: float | None = None
        """When the last step of this iteration was made; None before its first report, or that after it was adopted."""
        self._first: _First | None = None
        self._away: tuple[float, float] | None = None
        """When a pod was heard last, and when that was noticed, while this coordinator is out of touch."""
        self._goes_on = False
        """The iteration went on meanwhile, and is being taken over again."""
        self._first_run_s: float | None = None
        self._mark_s: float | None = None
        self._gained_s = self._shown_s = 0.0
        self._unproven_s = self._unproven_rank_s = 0.0
        """What was gained in iterations that ended before any step was reported, and that times ranks."""
        self._ended_s: float | None = None
        self._run_s: float | None = None
        self._step_before = -1
        self._world_size = 0
        self._stopped_s: float | None = None
        self._lost_rank_s = 0.0
        self._entered_s = -math.inf
        """When the last pod had entered an iteration."""
        self._taken = (0.0, 0.0)
        """From when until when the iteration ran that was taken over."""
        self._earlier = (0.0, 0.0, 0.0)
        """What the coordinator before has told: seconds of progress, those since the job first ran, and when."""
        self._earlier_stall_s = 0.0
        self._known_s = math.inf
        """Since when this coordinator knows itself what the job does."""
        self._has_earlier = False
        self._stall_iteration = -1
        self._stall_s = self._stall_base_s = self._judged_stall_s = 0.0
        """How long workers have stood still for checkpoints in that iteration: in all, before all ran, in a term."""
        self._began_s = 0.0
        """When all ran."""
        self._moved_s: float | None = None
        """When the job got anywhere last, as far as this coordinator saw; before it did, since when it looks."""
        self.account = Account()

    def has_gained(self, now_s: float) -> bool:
        """Return whether the job got anywhere since this was asked for the last time; ask before `stop`."""
        if self.max_step >= 0:
            has_gained = self.max_step > self._step_before
        else:
            has_gained = self._run_s is not None and now_s - self._run_s >= STEADY_RUN_S
        self._run_s = None
        self._step_before = self.max_step
        return has_gained

    def enter(self, at_s: float) -> None:
        """All workers of a pod had entered an iteration by then; it may be told a moment later."""
        self._entered_s = max(self._entered_s, at_s)

    def entered_s(self, planned_s: float, now_s: float) -> float:
        """Return when the last pod had entered the iteration that was planned then: now, where none has told."""
        return self._entered_s if self._entered_s >= planned_s else now_s

    def take_over(
        self, entered_s: float, until_s: float, now_s: float, world_size: int, *, held: int = 0, wanted: int = 0
    ) -> None:
        """Count an iteration of another coordinator that ran from `entered_s` until `until_s`, if it is the first.

        Of `world_size` ranks, while so many were held and wanted.
        """
        if self._first_run_s is not None or entered_s >= until_s:
            return
        self._first_run_s, self._world_size = entered_s, world_size
        self._known_s = self._moved_s = now_s
        self._taken = (entered_s, until_s)
        self._gained_s += until_s - entered_s
        self._stopped_s = until_s if until_s < now_s else None
        self.account.take_over(entered_s, until_s, now_s, world_size, held=held, wanted=wanted)

    def follow(self, earlier: EarlierRun, now_s: float) -> None:
        """Note what the coordinator before this one had reported."""
        if self._has_earlier:
            return
        gained_s, ran_for_s = min(earlier.gained_s, earlier.ran_for_s), earlier.ran_for_s
        spent = earlier.time or TimeSpent(gained_s, restart_s=ran_for_s - gained_s)
        # What was not judged when its coordinator was lost will not be.
        spent = replace(
            spent,
            redo_s=spent.redo_s + spent.open_s,
            open_s=0.0,
            progress_rank_s=min(spent.progress_rank_s, spent.held_rank_s),
        )
        # Nothing is older than what this one has seen itself.
        at_s = min(now_s - max(earlier.ago_s, 0.0), self._known_s)
        self._has_earlier = True
        self._earlier = (spent.progress_s, wall_of(spent), at_s)
        self._earlier_stall_s = spent.checkpoint_s
        self.account.follow(spent, at_s, max(earlier.suspended_s, 0.0))

    def totals(self, now_s: float) -> tuple[float, float | None]:
        """Return the seconds of progress, and those since the job first ran, under all coordinators; None: never."""
        if self._first_run_s is None:
            return 0.0, None
        end_s = now_s if self._ended_s is None else self._ended_s
        if not self._has_earlier:
            return self._seconds(now_s), max(end_s - self._first_run_s, 0.0)
        gained_s, before_s, at_s = self._earlier
        entered_s, until_s = self._taken
        if self._first_run_s <= at_s - before_s:
            stalled_s = min(self._earlier_stall_s, until_s - entered_s)
            return self._seconds(now_s) - stalled_s, max(end_s - self._first_run_s, 0.0)
        # What was taken over and was before that report is in it already.
        twice_s = max(min(until_s, at_s) - entered_s, 0.0)
        ran_for_s = max(end_s - (at_s - before_s), 0.0)
        return min(max(gained_s - twice_s + self._seconds(now_s), 0.0), ran_for_s), ran_for_s

    def run(self, now_s: float, world_size: int, iteration: int = -1) -> None:
        """All workers are known to have entered an iteration, or, after `regain`, to be in it still."""
        goes_on, self._goes_on = self._goes_on and self._mark_s is not None, False
        if goes_on:
            return
        self.give_up(now_s)  # Pods that came back would have said so.
        self._run_s = now_s
        if self._stall_iteration != iteration:
            self._stall_iteration, self._stall_s = iteration, 0.0
        # What was before that is judged, also of an iteration that was taken over.
        self._judged_stall_s = self._stall_base_s = self._stall_s
        self._began_s = now_s
        if self._first_run_s is None:
            self._first_run_s = self._known_s = self._moved_s = now_s
        self._lost_rank_s = self.lost_rank_s(now_s)
        self._stopped_s = None
        self._world_size = world_size
        self._mark_s = now_s
        adopted, step = self._adopted
        self._iteration_step = step if adopted == iteration else -1
        self._step_s = self._first = None
        self.account.run(now_s, world_size, counts_now=self.max_step < 0)

    def adopt(self, iteration: int, step: int) -> None:
        """Before all run: an iteration is taken over, whose workers had made this step by then; -1: none."""
        if self._mark_s is not None:
            return
        self._adopted = (iteration, step) if step >= 0 else (-1, -1)
        highest, self.max_step = self.max_step, max(self.max_step, step)
        if highest < 0 <= step:
            self._expect_steps()

    def stop(self, now_s: float, fault_s: float | None = None, is_hang: bool = False) -> None:
        """The iteration is over, since a fault if there was one.

        A step that hangs is over when one would have been: until then, nobody could have known.
        """
        if self._away is not None and fault_s is None:
            self.give_up(now_s)
        self._away, self._goes_on = None, False
        if self._mark_s is None:
            return
        self._keep_shown(now_s)
        until_s = now_s if fault_s is None else max(min(fault_s, now_s), self._mark_s)
        self._settle_first()
        self._judge_stall(until_s)
        if self.max_step >= 0 and self._iteration_step < 0:
            self._count(until_s, Spent.RESTART)  # It was getting ready.
        elif is_hang:
            until_s = min(max(until_s, self._mark_s + (self._pace.step_s or 0.0)), now_s)
        self.account.stop(now_s, until_s)
        if self.max_step < 0:
            ran_s = max(until_s - self._mark_s, 0.0)
            self._gained_s += ran_s
            self._unproven_s += ran_s
            self._unproven_rank_s += ran_s * self._world_size
            self._mark_s = self._moved_s = self._mark_s + ran_s
        self._lost_rank_s += (now_s - self._mark_s) * self._world_size
        self._mark_s = None
        self._stopped_s = now_s

    @property
    def is_away(self) -> bool:
        """Whether it is for the pods to say what became of the iteration, once they are heard again."""
        return self._away is not None or self._goes_on

    def lose_touch(self, now_s: float, heard_s: float) -> None:
        """No pod is heard any more, the last one at `heard_s`: it may train on, unseen, or not."""
        if self._mark_s is not None:
            self._away, self._goes_on = (min(heard_s, now_s), now_s), False

    def regain(self, step: int, made_s: float, now_s: float) -> None:
        """The pods are heard again, in the same iteration; the last step that they tell was made then; -1: none."""
        if self._away is not None:
            self._away, self._goes_on = None, True
            self.step(step, made_s, now_s)

    def give_up(self, now_s: float) -> None:
        """The iteration is over, unseen: what came after the last word of a pod was for the detection of that."""
        if self._away is not None:
            self._keep_shown(now_s)
            (heard_s, noticed_s), self._away = self._away, None
            self.stop(noticed_s, heard_s)
            self.account.settle(now_s, Spent.WAITING)

    def end(self, now_s: float) -> None:
        """The job is over; to say so again changes nothing."""
        if self._ended_s is None:
            self.stop(now_s)
            self._ended_s = now_s
            self.account.end(now_s)

    def stall(self, iteration: int, seconds: float, now_s: float) -> None:
        """A worker has stood still for checkpoints for so long in this iteration; to be told before its step."""
        if iteration < self._stall_iteration or (iteration != self._stall_iteration and self._mark_s is not None):
            return  # Another iteration than the one that runs, or that is to run.
        if iteration > self._stall_iteration:
            self._stall_iteration, self._stall_s = iteration, 0.0
        # No worker can have stood still for longer than it ran; before all ran nothing is judged.
        most_s = math.inf if self._mark_s is None else self._stall_base_s + max(now_s - self._began_s, 0.0)
        self._stall_s = max(self._stall_s, min(seconds, most_s))
        if self.max_step < 0 and self._mark_s is not None:
            # No step will say what this stretch was, and it was shown as progress.
            self._keep_shown(now_s)
            self._judge_stall(now_s)

    def _unjudged_stall_s(self, until_s: float) -> float:
        """Return how much of the stretch until then was for checkpoints."""
        return (
            0.0 if self._mark_s is None else max(min(self._stall_s - self._judged_stall_s, until_s - self._mark_s), 0)
        )

    def _judge_stall(self, until_s: float) -> None:
        """Put what was for checkpoints into its term; the rest of the stretch begins after it."""
        stalled_s = self._unjudged_stall_s(until_s)
        if self._mark_s is None or stalled_s <= 0.0:
            return
        stalled_until_s = self._mark_s + stalled_s
        self.account.settle(stalled_until_s, Spent.CHECKPOINT)
        self._judged_stall_s += stalled_s
        self._lost_rank_s += stalled_s * self._world_size
        self._mark_s = stalled_until_s

    def step(self, step: int, made_s: float, now_s: float | None = None) -> None:
        """A worker has reported a step that it made by `made_s`; not before what is judged already.

        It is heard at `now_s`; None: as soon as it was made.
        """
        if step <= self._iteration_step:
            return  # Another worker was faster.
        before, self._iteration_step = self._iteration_step, step
        self._keep_shown(made_s if now_s is None else now_s)
        highest, self.max_step = self.max_step, max(self.max_step, step)
        if self._mark_s is not None:
            made_s = max(made_s, self._mark_s if self._step_s is None else self._step_s)
        if highest < 0:
            self._expect_steps()
        if step > highest and self._moved_s is not None:  # Else the job has not run, whatever a pod says.
            self._moved_s = max(self._moved_s, made_s)
        if self._mark_s is None:
            return
        if before < 0:
            self._take_first(step, highest, made_s)
        else:
            self._take_next(step, before, highest, made_s)
        self._step_s = made_s

    def _keep_shown(self, now_s: float) -> None:
        """Before what seemed to be progress is judged: so much was shown until now."""
        self._shown_s = self.gained_s(now_s)

    def _expect_steps(self) -> None:
        """The first step of the job is known: iterations without one were shown as progress until now."""
        self._gained_s -= self._unproven_s
        self._lost_rank_s += self._unproven_rank_s
        self.account.expect_steps()

    def _take_first(self, step: int, highest: int, now_s: float) -> None:
        """Take the first report of an iteration: it ends what came before the first step."""
        self._judge_stall(now_s)
        self.account.await_step()
        # Steps that the job had not reached were made since it entered, however late the first of them was told.
        steps = step - highest if 0 <= highest < step else 1
        self._first = _First(now_s, steps, Spent.PROGRESS if step > highest else Spent.REDO)
        if self._pace.step_s is not None:
            self._settle_first()

    def _settle_first(self) -> None:
        """Put what led to the first report into its terms: where no pace is known, nobody can say that it trained."""
        first, self._first = self._first, None
        if first is None or self._mark_s is None:
            return
        took_s = (self._pace.step_s or 0.0) * first.steps
        self._count(max(self._mark_s, first.at_s - took_s), Spent.RESTART)
        self._count(first.at_s, first.term)

    def _take_next(self, step: int, before: int, highest: int, now_s: float) -> None:
        if self._step_s is not None:
            stalled_s = max(self._stall_s - self._judged_stall_s, 0.0)
            self._pace.note(now_s - self._step_s - stalled_s, step - before)
        self._settle_first()
        self._judge_stall(now_s)
        if before < highest < step and self._mark_s is not None:
            # So much of it was work that is done again: agents tell steps once in a while.
            share = (highest - before) / (step - before)
            self._count(self._mark_s + (now_s - self._mark_s) * share, Spent.REDO)
        self._count(now_s, Spent.PROGRESS if step > highest else Spent.REDO)

    def _count(self, until_s: float, term: Spent) -> None:
        """What is not judged until then was for this."""
        if self._mark_s is None or until_s <= self._mark_s:
            return
        self.account.judge(until_s, term)
        if term is Spent.PROGRESS:
            self._gained_s += until_s - self._mark_s
        else:
            self._lost_rank_s += (until_s - self._mark_s) * self._world_size
        self._mark_s = until_s

    def gained_s(self, now_s: float) -> float:
        """Return the seconds of first-time progress; never falls, even if there was less than it seemed."""
        return max(self._shown_s, self._seconds(now_s))

    def still_for_s(self, now_s: float) -> float:
        """Return the seconds since the job got anywhere: to a step for the first time, or, without steps, at all.

        A new coordinator begins to count when it takes over. 0 before the job has run, and once it is over.
        """
        runs_without_steps = self.max_step < 0 and self._mark_s is not None
        if self._moved_s is None or self._ended_s is not None or runs_without_steps:
            return 0.0
        return max(now_s - self._moved_s, 0.0)

    def _seconds(self, now_s: float) -> float:
        end_s = now_s if self._ended_s is None else self._ended_s
        return self._gained_s + (end_s - self._mark_s if self._mark_s is not None and self.max_step < 0 else 0.0)

    def lost_rank_s(self, now_s: float) -> float:
        """Return the seconds that were lost, times ranks; never falls. Time since the last step is not judged yet."""
        end_s = now_s if self._ended_s is None else self._ended_s
        return self._lost_rank_s + (0.0 if self._stopped_s is None else (end_s - self._stopped_s) * self._world_size)

    def ettr(self, now_s: float) -> float | None:
        """Return the ratio, 0 to 1; None before the job ran."""
        gained_s, wall_s = self.totals(now_s)
        if wall_s is None:
            return None
        spent = self.account.spent(now_s)
        wall_s -= 0.0 if spent is None else spent.suspended_s
        return 1.0 if wall_s <= 0 else min(gained_s / wall_s, 1.0)
