"""Faults that are drawn from a seed, and what a training without them has that one with them lacks."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.integrations.test_trainers import Kept

MAX_DRAWS = 50
MAX_SHOWN = 700


class BrokenError(RuntimeError):
    """The fault."""


@dataclass(frozen=True)
class Fault:
    """In the n-th call of a hook, counted from the last fault on."""

    hook: str
    call: int
    loses_memory: bool
    """Checkpoints in memory are gone as well; what the framework has written itself is left."""


@dataclass
class Hooks:
    """What hooks are called, with a fault in one of these calls."""

    fault: Fault | None = None
    calls: dict[str, int] = field(default_factory=dict)

    def called(self, hook: str) -> None:
        """Count the call. Raises BrokenError in the one that is to fail."""
        self.calls[hook] = self.calls.get(hook, 0) + 1
        if self.fault is not None and (hook, self.calls[hook]) == (self.fault.hook, self.fault.call):
            raise BrokenError


def tell_hooks(kind: type, hooks: Iterable[str]) -> None:
    """Let objects of this class, which have `hooks`, tell of each call of these hooks; it may raise."""
    for hook in hooks:

        def tell(self: Any, *args: Any, _hook: str = hook, **kwargs: Any) -> None:
            self.hooks.called(_hook)

        setattr(kind, hook, tell)


def count_hooks(kind: type, hooks: Iterable[str]) -> None:
    """Let objects of this class, which have `counts`, count the calls of these hooks."""
    for hook in hooks:

        def count(self: Any, *args: Any, _hook: str = hook, **kwargs: Any) -> None:
            self.counts[_hook] = self.counts.get(_hook, 0) + 1

        setattr(kind, hook, count)


Iteration = Callable[[int, Hooks], dict[str, Any]]
"""Trains from what is kept, in a folder of its own; returns what has come out. Takes the number of the iteration."""


def train(iteration: Iteration, faults: Sequence[Fault]) -> tuple[dict[str, Any], dict[str, int]]:
    """Train through these faults; return what has come out, and how often each hook was called in the last iteration.

    A fault whose call does not come is none.
    """
    Kept.kept = None
    for number in range(len(faults) + 1):
        hooks = Hooks(faults[number] if number < len(faults) else None)
        try:
            return iteration(number, hooks), hooks.calls
        except BrokenError:
            if faults[number].loses_memory:
                Kept.kept = None
    raise AssertionError("a fault came after the last one")


def draw(chance: random.Random, calls: Mapping[str, int], *, may_lose: bool) -> list[Fault]:
    """Return one to three faults, the first of which comes surely in a training with these calls of hooks."""
    faults = []
    for number in range(chance.choice((1, 1, 1, 2, 3))):
        hook = chance.choice(sorted(calls))
        last = calls[hook] if number == 0 else 10
        faults.append(Fault(hook, chance.randint(1, max(last, 1)), chance.random() < 0.3 and may_lose))
    return faults


def differences(calm: Mapping[str, Any], broken: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what is not equal, by its name."""
    return {
        name: (str(calm[name])[:MAX_SHOWN], str(broken[name])[:MAX_SHOWN])
        for name in calm
        if calm[name] != broken[name]
    }
