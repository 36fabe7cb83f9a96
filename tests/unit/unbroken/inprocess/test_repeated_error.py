"""A traceback that comes back is not shown again and again."""

import logging
import traceback
from pathlib import Path
from typing import Any

import pytest

from unbroken.inprocess.loop import repeated_error
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


def test_the_frames_of_the_library_around_the_function_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    own = f"{Path(repeated_error.__file__).parent}/call.py"
    places: dict[str, Any] = {"raised": lambda: (_ for _ in ()).throw(raised("boom"))}
    exec(compile("def body():\n    next(raised())\n", own, "exec"), places)
    with pytest.raises(ValueError, match="boom") as found:
        places["body"]()
    # The library's frame is the outermost.
    caught = found.value.with_traceback(found.value.__traceback__ and found.value.__traceback__.tb_next)
    with caplog.at_level(logging.ERROR):
        RepeatedError().log(caught, 0, 1)
    assert "call.py" in "".join(traceback.format_exception(caught))
    assert "call.py" not in caplog.text
    assert "ValueError: boom" in caplog.text
    assert Path(__file__).name in caplog.text
