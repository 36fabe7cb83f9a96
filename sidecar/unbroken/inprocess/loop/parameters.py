"""Passes the CallWrapper to parameters that are annotated with it."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any


def bind_by_annotation(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type, value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with `value` for every parameter annotated `kind` or `kind | None`.

    Raises TypeError when the arguments do not fit the function.
    """
    names = [name for name, annotation in _annotations(function).items() if _accepts(annotation, kind)]
    if not names:
        _refuse_misfit(function, args, kwargs, kind)
        return args, dict(kwargs)
    signature = inspect.signature(function)
    bound = signature.bind_partial(*args, **kwargs)
    bound.arguments.update({name: value for name in names if name in signature.parameters})
    bound.apply_defaults()
    # Report missing arguments as the function itself would.
    signature.bind(*bound.args, **bound.kwargs)
    return bound.args, bound.kwargs


def _refuse_misfit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type) -> None:
    """Raise what the call would raise, before it costs every worker of the job its restarts."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        # Not every built-in function has a signature.
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        hint = f"no parameter is annotated with {kind.__name__}, so nothing is added to those of the call"
        raise TypeError(f"{name}: {error}; {hint}") from None


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        # A string annotation may name something unknown here: take the annotations as they are.
        return {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}


def _accepts(annotation: Any, kind: type) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return kind in typing.get_args(annotation)
    return annotation is kind
