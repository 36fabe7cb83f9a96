"""What interrupted an iteration, as the reference names it."""

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass


class Interruption(enum.Enum):
    """Kinds of interruption."""

    EXCEPTION = enum.auto()
    BASE_EXCEPTION = enum.auto()
    SOFT_TIMEOUT = enum.auto()
    HARD_TIMEOUT = enum.auto()
    TERMINATED = enum.auto()
    UNRESPONSIVE = enum.auto()
    MONITOR_PROCESS_EXCEPTION = enum.auto()
    """Never reported: there is no monitor process. Kept for scripts that compare with it."""


@dataclass(frozen=True)
class InterruptionRecord:
    """One interruption; `rank` is the culprit's active rank."""

    rank: int
    interruption: Interruption

    @classmethod
    def from_str(cls, string: str) -> "InterruptionRecord":
        """Read the text of repr(). Raises ValueError when it is not one."""
        rank = re.search(r"rank=(\d+)", string)
        kind = re.search(r"Interruption\.(\w+)", string)
        if rank is None or kind is None or kind[1] not in Interruption.__members__:
            raise ValueError(f"InterruptionRecord: want the text of its repr, got {string!r}")
        return cls(rank=int(rank[1]), interruption=Interruption[kind[1]])


def format_interruption_records(records: Iterable[InterruptionRecord]) -> str:
    """Return one line for people: each kind once, with its ranks in ascending order."""
    ranks_by_kind: dict[Interruption, set[int]] = {}
    for record in records:
        ranks_by_kind.setdefault(record.interruption, set()).add(record.rank)
    return ", ".join(f"{kind} on ranks={sorted(ranks)}" for kind, ranks in ranks_by_kind.items())
