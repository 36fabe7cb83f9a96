"""When a container that ended is started again: at once, then after growing pauses, as the real kubelet does."""

from dataclasses import dataclass, replace

from unbroken_local.kubelet.decide import ContainerState, Phase, Termination


@dataclass(frozen=True)
class BackOff:
    """Pauses in seconds: none before the first restart, then `base_s`, doubled each time up to `limit_s`."""

    base_s: float = 1.0
    limit_s: float = 60.0

    def pause_s(self, failures: int) -> float:
        """Return the pause before the restart that follows `failures` ends in a row (1-based)."""
        return 0.0 if failures <= 1 else min(self.base_s * 2.0 ** min(failures - 2, 30), self.limit_s)

    @property
    def reset_s(self) -> float:
        """A run of this length makes the next end the first one again."""
        return 2.0 * self.limit_s


def ended(state: ContainerState, termination: Termination, *, pause_s: float, now_s: float) -> ContainerState:
    """Return the state of a container whose process ended."""
    return replace(
        state,
        phase=Phase.TERMINATED,
        reason="",
        message="",
        is_started=False,
        is_ready=False,
        started_at=None,
        termination=termination,
        not_before_s=now_s + pause_s,
        is_busy=False,
    )


def exit_code_of(code: int) -> int:
    """Return the exit code that a container shows: 128 + N for a process that signal N ended."""
    return code if code >= 0 else 128 - code
