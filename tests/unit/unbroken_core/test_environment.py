"""A program that lacks a variable names it."""

import pytest

from unbroken_core.conventions.environment import needed
from unbroken_core.vocabulary.errors import InputError


@pytest.mark.parametrize(
    "source", [{}, {"UNBROKEN_DIR": ""}, {"UNBROKEN_POD": "p-0"}], ids=["none", "empty", "another"]
)
def test_a_variable_that_is_missing_or_empty_is_named(source: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"^UNBROKEN_DIR: want a value in the environment, got nothing$"):
        needed(source, "UNBROKEN_DIR")
    assert needed({**source, "UNBROKEN_DIR": " /run"}, "UNBROKEN_DIR") == " /run"
