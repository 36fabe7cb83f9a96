"""Limits on rates: of messages, and of wrong tokens."""

MESSAGES_PER_S = 200.0
"""Per agent, on average: 64 workers that all change three times a second."""
MESSAGES_AT_ONCE = 1000.0
FAILURES_PER_S = 5.0
"""Answers to one address with a wrong token; beyond them the connection is cut without an answer."""
FAILURES_AT_ONCE = 50.0
_MAX_ADDRESSES = 1024


class TokenBucket:
    """A token bucket: so many at once, and so many per second on average."""

    __slots__ = ("_at_s", "_burst", "_left", "_rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._left = burst
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take one; return the seconds to wait for it, 0 for none."""
        self._left = min(self._left + (now_s - self._at_s) * self._rate_per_s, self._burst) - 1.0
        self._at_s = now_s
        return 0.0 if self._left >= 0 else -self._left / self._rate_per_s

    def give_back(self) -> None:
        """Give the last one back."""
        self._left += 1.0


class FailureRate:
    """Decides which addresses still get an answer to a wrong token. Remembers a limited number of them."""

    def __init__(self) -> None:
        self._budgets: dict[str, TokenBucket] = {}

    def may_answer(self, address: str, now_s: float) -> bool:
        """Return whether this failure is answered."""
        budget = self._budgets.get(address)
        if budget is None:
            if len(self._budgets) >= _MAX_ADDRESSES:
                self._budgets.clear()
            budget = self._budgets[address] = TokenBucket(FAILURES_PER_S, FAILURES_AT_ONCE, now_s)
        if budget.take(now_s) == 0:
            return True
        budget.give_back()  # Who goes on does not have to wait ever longer.
        return False
