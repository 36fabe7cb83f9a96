"""One condition before its times are known, and how names and messages are kept short."""

from collections.abc import Sequence
from dataclasses import dataclass

from unbroken_core.conventions.printable import printable
from unbroken_core.vocabulary.reasons import Reason
from unbroken_operator.api.status_models import ConditionType
from unbroken_operator.decisions.snapshot import PodView

MAX_MESSAGE = 1000
MAX_NAMES = 5


@dataclass(frozen=True)
class ConditionState:
    """A condition without its times."""

    type: ConditionType
    is_true: bool | None
    """None means unknown."""
    reason: Reason
    message: str


def pod_names(pods: Sequence[PodView]) -> str:
    """Return the names of the pods, the first few and how many more."""
    return listed([pod.name for pod in pods])


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first few names and how many more there are."""
    rest = len(names) - MAX_NAMES
    shown = separator.join(names[:MAX_NAMES])
    return f"{shown} and {rest} more" if rest > 0 else shown


def cut(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return a message in one printable line that is no longer than a condition may have."""
    text = printable(text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
