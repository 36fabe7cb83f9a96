"""What callbacks of a framework keep without a state of theirs: it begins anew after a fault, so it is named."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from unbroken.integrations.module_values import PlainValues

logger = logging.getLogger(__name__)

OWN = ("lightning", "pytorch_lightning", "transformers", "unbroken")
"""Packages whose callbacks are known: what they keep beside their states does not change a training."""
MAX_NAMES = 10


class CallbackValues:
    """Plain values and tensors that callbacks have when a training begins.

    `has_state`: of a callback that the framework restores. `model`: what trains, which is no callback's own.
    """

    def __init__(self, callbacks: Sequence[Any], has_state: Callable[[Any], bool], model: nn.Module) -> None:
        self._has_state = has_state
        self._of_model = frozenset(map(id, [*model.modules(), *model.parameters(), *model.buffers()]))
        self._tensors = dict(self._marks(callbacks))
        self._begun = {name: PlainValues(one) for name, one in self._unknown(callbacks)}

    def changed(self, callbacks: Sequence[Any]) -> list[str]:
        """Return the names of those that are others now, the first few."""
        new = PlainValues(SimpleNamespace())
        found = [
            f"{name}.{key}" for name, one in self._unknown(callbacks) for key in self._begun.get(name, new).changed(one)
        ]
        found += [name for name, mark in self._marks(callbacks) if mark != self._tensors.get(name, ())]
        return found[:MAX_NAMES]

    def _marks(self, callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        for name, one in self._unknown(callbacks):
            for key, value in vars(one).items():
                tensors = () if id(value) in self._of_model else _tensors_of(value)
                yield f"{name}.{key}", tuple(_mark(each) for each in tensors if id(each) not in self._of_model)

    def _unknown(self, callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        """Yield them by name; another one of the same class has a number."""
        seen: Counter[str] = Counter()
        for one in callbacks:
            if type(one).__module__.partition(".")[0] not in OWN and not self._has_state(one):
                name = type(one).__qualname__
                seen[name] += 1
                yield name if seen[name] == 1 else f"{name}[{seen[name]}]", one


def _tensors_of(value: Any) -> Sequence[torch.Tensor]:
    """Return those of a tensor, a module, or a dictionary or list that begins with one."""
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    if not isinstance(next(iter(parts), None), torch.Tensor):
        return ()
    return [one for one in parts if isinstance(one, torch.Tensor)]


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what is another one once the tensor was written, or another one is in its place."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def tell_lost(names: Sequence[str], instead: str) -> None:
    """Name them in the log, with what to do: `instead`."""
    if names:
        logger.warning(
            "callbacks begin anew with what they had changed: names=%d: %s; %s, if the training depends on it",
            len(names),
            ", ".join(names)[:1000],
            instead,
        )
