"""Chain plug-ins into one."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any


def _common_base(instances: tuple[Any, ...]) -> type:
    shared = set.intersection(*(set(type(instance).__mro__) for instance in instances))
    return next(base for base in type(instances[0]).__mro__ if base in shared)


def _takes_arguments(callable_: Callable[..., Any]) -> bool:
    return len(inspect.signature(callable_).parameters) > 0


class Composition:
    """`Compose(a, b, c)(x)` is `a(b(c(x)))`.

    The result is an instance of the nearest common base class of all parts, so that it passes wherever each of them
    would. Raises TypeError without parts, or when one of them cannot be called.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Any:
        if not instances:
            raise TypeError("Compose: want at least one callable, got none")
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"Compose: want callables, got {instance!r} of type {type(instance).__name__}")
        base = _common_base(instances)
        bases = (Composition,) if base is object else (Composition, base)
        made = type("Compose", bases, {"instances": instances, "__new__": object.__new__})
        return made()

    def __init__(self, *_: Callable[..., Any]) -> None:
        """Do not call the constructor of the common base: the parts exist already."""

    def __call__(self, *args: Any) -> Any:
        """Call the parts from right to left, each with the result of the one before."""
        result: Any = None
        for instance in reversed(self.instances):
            result = instance(*args)
            if result is None and args and args != (None,):
                warnings.warn(
                    f"Compose: want {instance!r} to return what the next part takes, got None for {args!r}",
                    stacklevel=2,
                )
            is_chained = isinstance(result, tuple) or not _takes_arguments(instance)
            args = (result if isinstance(result, tuple) else ()) if is_chained else (result,)
        return result


Compose: Any = Composition
"""The public name. Any, because the type checker cannot know the common base of the parts."""
