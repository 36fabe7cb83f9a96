"""Plug-ins that may not end."""

import datetime
import re
import threading

import pytest

from unbroken import inprocess
from unbroken.inprocess.bounded import call_bounded
from unbroken.inprocess.state import State

PATIENT = datetime.timedelta(seconds=90)
NONE = datetime.timedelta(0)


def test_call_that_does_not_end_is_left_with_what_was_wanted() -> None:
    end = threading.Event()
    try:
        with pytest.raises(inprocess.exception.TimeoutError, match="want an end within 0 s, it still runs"):
            call_bounded(end.wait, NONE, "name-of-the-thread", "want an end")
        assert "name-of-the-thread" in {thread.name for thread in threading.enumerate()}
    finally:
        end.set()


def test_threaded_finalize_calls_with_its_arguments_in_another_thread() -> None:
    seen: list[object] = []

    def clean(*args: object, **kwargs: object) -> None:
        seen.append((args, kwargs, threading.current_thread() is threading.main_thread()))

    state = State(rank=3, world_size=4).freeze()
    finalize = inprocess.finalize.ThreadedFinalize(PATIENT, clean, (1, 2), {"three": 3})
    assert finalize(state) is state
    assert seen == [((1, 2), {"three": 3}, False)]


def test_threaded_finalize_raises_what_its_function_raises() -> None:
    def fail() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        inprocess.finalize.ThreadedFinalize(PATIENT, fail)(State(rank=0, world_size=1).freeze())


def test_threaded_finalize_that_hangs_names_its_function() -> None:
    end = threading.Event()
    try:
        with pytest.raises(inprocess.exception.TimeoutError, match=re.escape(f"ThreadedFinalize: want {end.wait!r}")):
            inprocess.finalize.ThreadedFinalize(NONE, end.wait)(State(rank=0, world_size=1).freeze())
    finally:
        end.set()
