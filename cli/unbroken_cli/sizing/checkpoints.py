"""Where training is, in whole ticks: how far it gets in a stretch of time, and from where it goes on after a fault.

Each tier makes a checkpoint whenever training has gone another of its intervals, and training stands still meanwhile.
"""

from collections.abc import Sequence

from unbroken_cli.sizing.faults import TICKS
from unbroken_cli.sizing.scenario import Tier


class CheckpointClock:
    """Work done, in ticks, and the checkpoints of it."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        ordered = sorted(tiers, key=lambda tier: tier.every_s)
        self._every = [max(round(tier.every_s * TICKS), 1) for tier in ordered]
        self._blocking = [round(tier.blocking_s * TICKS) for tier in ordered]
        self._restore = [round(tier.restore_s * TICKS) for tier in ordered]
        self._survives = [tier.survives for tier in ordered]
        self._valid_after = [0] * len(ordered)
        """Of each tier, checkpoints of up to so much work are gone."""
        self._is_lost = [False] * len(ordered)
        self._skipped = [-1] * len(ordered)
        """Of each tier, where a fault ended a checkpoint that was being made, and training went on from another one."""
        self.index = [list(tiers).index(tier) for tier in ordered]
        """The number that each tier has in the scenario."""
        self.work = 0
        self._pauses: list[list[int]] = []
        """Checkpoints that are being made, in order: the tier, and the ticks that it still takes."""

    def run(self, ticks: int) -> int:
        """Train for so long; return for how much of that training stood still."""
        stood = self._pause(ticks)
        ticks -= stood
        outer = range(1, len(self._every))
        while ticks > 0:
            if not self._every:
                self.work += ticks
                return stood
            # Up to the next checkpoint of a slower tier only the fastest counts, and that in one step.
            border = min([(self.work // self._every[tier] + 1) * self._every[tier] for tier in outer], default=None)
            ticks, still = self._run_fastest(ticks, border)
            stood += still
            if self.work == border:
                due = [[tier, self._blocking[tier]] for tier in outer if self.work % self._every[tier] == 0]
                self._pauses += due
                still = self._pause(ticks)
                stood += still
                ticks -= still
        return stood

    def _pause(self, ticks: int) -> int:
        """Make the checkpoints that have begun, as far as the time allows; return the time taken."""
        stood = 0
        while self._pauses:
            taken = min(self._pauses[0][1], ticks - stood)
            stood += taken
            self._pauses[0][1] -= taken
            if self._pauses[0][1]:
                break
            self._pauses.pop(0)
        return stood

    def _run_fastest(self, ticks: int, border: int | None) -> tuple[int, int]:
        """Train up to the border; return the ticks that are left, and those that training stood still."""
        every, blocking = self._every[0], self._blocking[0]
        inside = self.work % every
        start = self.work - inside
        count, rest = divmod(inside + ticks, every + blocking)
        work = start + count * every + min(rest, every)
        if border is not None and work >= border:
            # The fastest tier's own checkpoint at the border comes first.
            still = (border - start) // every * blocking
            left = ticks - (border - self.work) - still
            self.work = border
            if left < 0:
                self._pauses = [[0, -left]]
            return max(left, 0), still + min(left, 0)
        self.work = work
        if rest >= every:
            self._pauses = [[0, blocking - (rest - every)]]
        return 0, count * blocking + max(rest - every, 0)

    def go_back(self, severity: int) -> tuple[int, int, int | None]:
        """Go back to the newest checkpoint that outlives a fault; return work lost, ticks to restore, and the tier.

        Without any, training starts again; the tier is None then.
        """
        best, restore, chosen = 0, 0, None
        for tier, every in enumerate(self._every):
            made = self._last(tier, every)
            if self._survives[tier] < severity:
                continue
            if made > best or (made == best and made > 0 and chosen is not None and self._restore[tier] < restore):
                best, restore, chosen = made, self._restore[tier], tier
        for tier in range(len(self._every)):
            if self._survives[tier] < severity:
                self._valid_after[tier], self._is_lost[tier] = best, True
        making = {tier for tier, _left in self._pauses} if best == self.work else set()
        for tier, skipped in enumerate(self._skipped):
            if tier in making:
                self._skipped[tier] = best
            elif skipped > best:
                self._skipped[tier] = -1
        lost, self.work, self._pauses = self.work - best, best, []
        return lost, restore, None if chosen is None else self.index[chosen]

    def _last(self, tier: int, every: int) -> int:
        made = self.work // every * every
        if made == self.work and any(pause[0] == tier for pause in self._pauses):
            # It is not whole yet.
            made -= every
        if made == self._skipped[tier]:
            made -= every
        if self._is_lost[tier] and made <= self._valid_after[tier]:
            return 0
        return max(made, 0)
