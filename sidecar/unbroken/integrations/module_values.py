"""What a training changes in its modules beside parameters, buffers and modes: the rate of a dropout, peft's adapters.

No state_dict has it, and a new process makes modules as they were when the training began. What is changed in modules
of torch and of peft is put back. What other modules keep may mean something in one process alone (a time, a rank, a
file), so it is named where it is not there again.
"""

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import is_
from typing import Any

from torch import nn

from unbroken.integrations import text_states

logger = logging.getLogger(__name__)

KNOWN = ("torch", "peft")
"""Packages whose modules are the same in each process, given the same values."""
MAX_ITEMS = 64
"""Of a list or dictionary: a longer one is a record, not an option."""
_OWN = frozenset(vars(nn.Module()))


class PlainValues:
    """Plain values that one object has when a training begins: numbers, text, small lists and dictionaries of these."""

    def __init__(self, one: object, ignored: Collection[str] = ()) -> None:
        self._ignored = ignored
        self._num_names = len(vars(one))
        self._begun = {key: copy.deepcopy(value) for key, value in _plain(vars(one), vars(one), ignored)}
        self._simple = {key: value for key, value in self._begun.items() if not isinstance(value, dict | list | tuple)}
        self._others = vars(one).keys() - ignored - self._simple.keys()

    def changed(self, one: object) -> dict[str, Any]:
        """Return those that are others now."""
        now = vars(one)
        is_calm = len(now) == self._num_names and all(map(is_, map(now.get, self._simple), self._simple.values()))
        if is_calm and not self._others:
            return {}
        keys = self._others if is_calm and self._others <= now.keys() else now
        found = _plain(now, keys, self._ignored)
        return {key: value for key, value in found if not _is_same(value, self._begun.get(key, self))}


class ModuleValues:
    """Those of all modules of a model that begins to train."""

    def __init__(self, model: nn.Module, ignored: Collection[str] = ()) -> None:
        ignored = _OWN | set(ignored)
        self._begun = {name: PlainValues(module, ignored) for name, module in model.named_modules()}
        self._added = PlainValues(nn.Module(), ignored)

    def changed(self, model: nn.Module) -> dict[str, Any] | str:
        """Return what is another one than when it began, for JSON and `put_back`."""
        begun, added, found = self._begun, self._added, {}
        for name, module in model.named_modules():
            if other := begun.get(name, added).changed(module):
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


def _plain(values: Mapping[str, Any], keys: Iterable[str], ignored: Collection[str]) -> Iterator[tuple[str, Any]]:
    return ((key, values[key]) for key in keys if key not in ignored and _is_plain(values[key]))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= MAX_ITEMS and all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return len(value) <= MAX_ITEMS and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _is_same(one: Any, other: Any) -> bool:
    # NaN is not equal to itself.
    return type(one) is type(other) and (one == other or repr(one) == repr(other))
