"""How long to wait before something is tried again that failed."""

MAX_RETRY_S = 300.0


def retry_delay_s(num_failures: int) -> float:
    """Return how long to wait after so many failures in a row: 2, 8, 32, 128, then 300 seconds."""
    return 0.0 if num_failures <= 0 else min(2.0 * 4.0 ** min(num_failures - 1, 8), MAX_RETRY_S)
