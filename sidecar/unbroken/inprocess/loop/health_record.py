"""The last result of each health check, for the agent's metrics."""

from collections.abc import Callable

from unbroken.inprocess.compose import Compose, Composition
from unbroken.inprocess.health_check import HealthCheck
from unbroken.inprocess.state import FrozenState


class HealthRecord:
    """Results by the name of the check's class. Belongs to one call and its main thread."""

    def __init__(self) -> None:
        self._is_passed: dict[str, bool] = {}
        self._told: tuple[tuple[str, bool], ...] = ()

    def watch(self, check: Callable[[FrozenState], FrozenState]) -> HealthCheck:
        """Return a check that does the same and notes its result here; in a composition, the result of each part."""
        if isinstance(check, Composition):
            watched: HealthCheck = Compose(*(self.watch(part) for part in check.instances))
            return watched
        return _RecordedCheck(check, self._is_passed)

    def tell(self) -> tuple[tuple[str, bool], ...]:
        """Return all results by name, and count them as reported."""
        self._told = self._results()
        return self._told

    @property
    def is_news(self) -> bool:
        """Whether a result differs from the last report."""
        return self._results() != self._told

    def _results(self) -> tuple[tuple[str, bool], ...]:
        return tuple(sorted(self._is_passed.items()))


class _RecordedCheck(HealthCheck):
    """One check and where its result goes."""

    def __init__(self, check: Callable[[FrozenState], FrozenState], is_passed: dict[str, bool]) -> None:
        self._check = check
        self._is_passed = is_passed

    def __call__(self, state: FrozenState) -> FrozenState:
        """Run the check; raises what it raises. An interruption of the main thread is no result."""
        name = type(self._check).__name__
        try:
            result = self._check(state)
        except Exception:
            self._is_passed[name] = False
            raise
        if getattr(self._check, "has_checked", True):
            self._is_passed[name] = True
        else:
            # It found nothing to look at: neither passed nor failed, also where it once was.
            self._is_passed.pop(name, None)
        return result
