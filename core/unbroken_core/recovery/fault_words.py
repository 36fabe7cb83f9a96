"""Faults that came with the culprit's, and who took over from whom, in words. Pure."""

from collections.abc import Iterable, Sequence

from unbroken_core.protocol.messages import OtherFault
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Cause

MAX_OTHER = 300
"""Characters of the detail of a fault that is not the culprit's."""
_HANGS = (Cause.SOFT_TIMEOUT, Cause.HARD_TIMEOUT)


def other_texts(cause: Cause | str, detail: str, others: Iterable[OtherFault]) -> list[str]:
    """Return who failed besides a culprit of this cause and detail, and how; who failed alike is in one text."""
    alike: dict[tuple[str, str], list[str]] = {}
    for other in others:
        who = f"rank {other.rank} of {other.pod}" if other.rank is not None else other.pod or "a pod"
        alike.setdefault((str(other.cause), other.detail), []).append(who)
    texts = []
    for (how, what), failed in alike.items():
        is_same = (how, what) == (str(cause), one_line(detail))
        words = "the same" if is_same else how + (f" ({what})" if what else "")
        texts.append(f"{', '.join(failed)}: {words}")
    return texts


def one_line(detail: str) -> str:
    """Return as much of a detail as is kept of a fault that is not the culprit's."""
    return " ".join(detail.split())[:MAX_OTHER]


def rest_text(cause: str, num_faults: int, num_told: int) -> str:
    """Return how many faults nobody names, of so many with the culprit's; "" when there are none."""
    rest = num_faults - 1 - num_told
    if rest <= 0:
        return ""
    # Each rank that waits for the one that hangs has reported so.
    return f"{rest} more that failed or only waited" if cause in _HANGS else counted(rest, "more fault")


def takers_text(replaced_by: Sequence[str], moves: Iterable[tuple[str, str]]) -> str:
    """Return which pods took over, and from whom where that is known; "" when none did.

    `moves`: a pod that failed, and the one that has its rank now, "" where there is none.
    """
    before: dict[str, dict[str, None]] = {}
    for pod, taker in moves:
        if pod and taker in replaced_by:
            before.setdefault(taker, {})[pod] = None
    known = [f"{taker} took over from {' and '.join(before[taker])}" for taker in replaced_by if taker in before]
    others = [taker for taker in replaced_by if taker not in before]
    return " and ".join([*known, *([f"{', '.join(others)} took over"] if others else [])])
