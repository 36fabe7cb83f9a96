"""Pure: how long to wait before something is tried again."""

from unbroken_operator.adapters.errors import KubeError, KubeUnavailable

FIRST_S = 0.2
MAX_S = 60.0
MAX_ABSENCE_S = 15.0
"""While the API server is away: jobs go on soon after it is back."""
MAX_BESIDE_S = 1.6
"""Own part of the delay when the server has said how long it wants."""


def after_failure_s(error: KubeError, num_failures: int, spread: float) -> float:
    """Return the seconds to wait after so many failures in a row, at least those that the server asked for.

    `spread`, from 0 to 1, is drawn by the caller, so that those who failed together do not come back together.
    """
    asked_s = error.retry_after_s if isinstance(error, KubeUnavailable) else None
    limit_s = MAX_ABSENCE_S if isinstance(error, KubeUnavailable) else MAX_S
    own_s = min(FIRST_S * 2.0 ** min(num_failures, 12), limit_s if asked_s is None else MAX_BESIDE_S)
    return max(own_s * (0.5 + spread / 2), (asked_s or 0.0) * (1 + spread / 2))
