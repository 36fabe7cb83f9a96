"""What a training changes in its modules beside parameters, buffers and modes: the rate of a dropout, peft's adapters.

No state_dict has it, and a new process makes modules as they were when the training began. What is changed in modules
of torch and of peft is put back. What other modules keep may mean something in one process alone (a time, a rank, a
file), so it is named where it is not there again.
"""

import copy
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from unbroken.integrations import text_states

logger = logging.getLogger(__name__)

KNOWN = ("torch", "peft")
"""Packages whose modules are the same in each process, given the same values."""
MAX_ITEMS = 64
"""Of a list or dictionary: a longer one is a record, not an option."""
_OWN = frozenset(vars(nn.Module()))


class ModuleValues:
    """Plain values (numbers, text, small lists and dictionaries of these) of a model that begins to train."""

    def __init__(self, model: nn.Module, ignored: Collection[str] = ()) -> None:
        self._ignored = _OWN | set(ignored)
        self._begun = {name: copy.deepcopy(dict(self._values(one))) for name, one in model.named_modules()}

    def changed(self, model: nn.Module) -> dict[str, Any] | str:
        """Return what is another one than when it began, for JSON and `put_back`."""
        found: dict[str, Any] = {}
        for name, module in model.named_modules():
            begun = self._begun.get(name, {})
            other = {key: one for key, one in self._values(module) if not _is_same(one, begun.get(key, module))}
            if other:
                found[name] = other
        return text_states.for_json(found)

    def put_back(self, model: nn.Module, changed: dict[str, Any] | str) -> None:
        """Set what is known, once the training has begun as any does, and name what is not there again."""
        modules, lost = dict(model.named_modules()), []
        for name, values in text_states.from_json(changed).items():
            module = modules.get(name)
            if module is not None and type(module).__module__.partition(".")[0] in KNOWN:
                module.__dict__.update(copy.deepcopy(values))
                continue
            now: Mapping[str, Any] = {} if module is None else vars(module)
            lost += [
                f"{name}.{key}".lstrip(".") for key, one in values.items() if not _is_same(now.get(key, self), one)
            ]
        if lost:
            logger.warning(
                "changed in training and not restored: names=%d: %s; keep in a checkpoint what the training depends on",
                len(lost),
                ", ".join(lost[:10])[:1000],
            )

    def _values(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        return ((key, one) for key, one in vars(module).items() if key not in self._ignored and _is_plain(one))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= MAX_ITEMS and all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return len(value) <= MAX_ITEMS and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _is_same(one: Any, other: Any) -> bool:
    # NaN is not equal to itself.
    return type(one) is type(other) and (one == other or repr(one) == repr(other))
