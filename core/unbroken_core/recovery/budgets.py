"""The budgets of the rungs: which of them a job lists, and how often each may still be used."""

from collections import deque
from collections.abc import Iterable

from unbroken_core.protocol.settings import RungBudget
from unbroken_core.vocabulary.reasons import Rung


class Budgets:
    """Uses of each rung in a sliding window. All times are monotonic seconds of one clock."""

    def __init__(self, budgets: Iterable[RungBudget]) -> None:
        self._budgets = {budget.rung: budget for budget in budgets}
        self._uses: dict[Rung, deque[float]] = {rung: deque() for rung in self._budgets}

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """Listed rungs in ladder order."""
        return tuple(self._budgets)

    @property
    def allowed(self) -> frozenset[Rung]:
        """Listed rungs that may be used at all, however often they were."""
        return frozenset(rung for rung, budget in self._budgets.items() if budget.limit != 0)

    def is_possible(self, rung: Rung, now_s: float) -> bool:
        """Return whether the rung is listed and has budget left."""
        budget = self._budgets.get(rung)
        if budget is None:
            return False
        return budget.limit is None or self.num_uses(rung, now_s) < budget.limit

    def possible(self, now_s: float) -> frozenset[Rung]:
        """Return all rungs that may be used now."""
        return frozenset(rung for rung in self._budgets if self.is_possible(rung, now_s))

    def charge(self, rung: Rung, now_s: float) -> None:
        """Count one use; a rung that is not listed costs nothing."""
        budget = self._budgets.get(rung)
        if budget is not None and budget.limit is not None:
            self._uses[rung].append(now_s)

    def num_uses(self, rung: Rung, now_s: float) -> int:
        """Return the uses in the window that ends now. A use leaves the window when it is `window_s` old."""
        budget = self._budgets[rung]
        uses = self._uses[rung]
        while uses and uses[0] <= now_s - budget.window_s:
            uses.popleft()
        return len(uses)

    def spent(self, now_s: float) -> tuple[str, ...]:
        """Return one text for each listed rung whose budget is used up: "process (3 in 3600 s)"."""
        return tuple(
            f"{rung} ({budget.limit} in {budget.window_s:g} s)"
            for rung, budget in self._budgets.items()
            if not self.is_possible(rung, now_s)
        )
