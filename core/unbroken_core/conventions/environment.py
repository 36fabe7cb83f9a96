"""What a program cannot start without, read from the environment that its config module is given."""

from collections.abc import Mapping

from unbroken_core.vocabulary.errors import InputError


def needed(source: Mapping[str, str], name: str) -> str:
    """Return the value of a variable. Raises InputError when it is missing or empty."""
    value = source.get(name, "")
    if not value:
        raise InputError(f"{name}: want a value in the environment, got nothing")
    return value
