"""A traceback that comes back is not shown again and again."""

import logging

import pytest

from unbroken.inprocess.loop.repeated_error import RepeatedError


def raised(text: str, other: bool = False) -> ValueError:
    try:
        if other:
            raise ValueError(text)
        raise ValueError(text)
    except ValueError as error:
        return error


def test_same_traceback_is_shown_twice_and_counted_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    errors = RepeatedError()
    with caplog.at_level(logging.ERROR):
        for iteration in range(4):
            errors.log(raised(f"step {iteration}"), iteration, 1)
        errors.log(raised("step 4", other=True), 4, 1)
    assert [record.exc_info is not None for record in caplog.records] == [True, True, False, False, True]
    assert caplog.records[3].getMessage() == "function raised: iteration=3 rank=1: ValueError, same as before (4x)"
