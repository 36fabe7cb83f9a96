"""What callbacks of a framework keep without a state of theirs: it begins anew after a fault, so it is named."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from unbroken.integrations.module_values import PlainValues

logger = logging.getLogger(__name__)

OWN = ("lightning", "pytorch_lightning", "transformers", "unbroken")
"""Packages whose callbacks are known: what they keep beside their states does not change a training."""
MAX_NAMES = 10


class CallbackValues:
    """Numbers, text, small lists and dictionaries that callbacks have when a training begins."""

    def __init__(self, callbacks: Iterable[Any], has_state: Callable[[Any], bool]) -> None:
        self._has_state = has_state
        self._begun = {name: PlainValues(one) for name, one in self._unknown(callbacks)}

    def changed(self, callbacks: Iterable[Any]) -> list[str]:
        """Return the names of those that are others now, the first few."""
        new = PlainValues(SimpleNamespace())
        found = [
            f"{name}.{key}" for name, one in self._unknown(callbacks) for key in self._begun.get(name, new).changed(one)
        ]
        return found[:MAX_NAMES]

    def _unknown(self, callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        for one in callbacks:
            if type(one).__module__.partition(".")[0] not in OWN and not self._has_state(one):
                yield type(one).__qualname__, one


def tell_lost(names: Sequence[str], instead: str) -> None:
    """Name them in the log, with what to do: `instead`."""
    if names:
        logger.warning(
            "callbacks begin anew with what they had changed: names=%d: %s; %s, if the training depends on it",
            len(names),
            ", ".join(names)[:1000],
            instead,
        )
