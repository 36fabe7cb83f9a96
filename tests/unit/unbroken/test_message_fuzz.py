"""Whatever is said to them, those who listen take it or refuse it, and what they say keeps to its bounds.

A few messages; `make soak` sends a million.
"""

import contextlib
import gc
import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzzing.__main__ import ALL, ByteSource
from tests.fuzzing.targets import CoordinatorTarget

from unbroken_core.errors import WireError

MOST_STEPS = 40
NUM_HEARD, MAX_GROWTH_BYTES = 500, 96 << 10
"""Less than 200 bytes a message: whatever was kept of each one would be more."""


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15)
@given(data=st.binary(min_size=100, max_size=2000))
def test_who_listens_takes_or_refuses_whatever_is_said(name: str, data: bytes) -> None:
    source = ByteSource(data)
    target = ALL[name](source)
    for _ in range(MOST_STEPS):
        if source.is_empty:
            break
        target.step()


@pytest.mark.parametrize("name", ALL)
def test_most_of_what_is_said_is_heard(name: str) -> None:
    """A fuzzer whose messages are all refused at the door tests the door only."""
    target = ALL[name](Random(1))
    for _ in range(300):
        target.step()
    assert target.num_refused < 240


def test_bytes_are_a_source_of_randomness() -> None:
    source = ByteSource(bytes(range(1, 200)))
    assert 0 <= source.random() < 1
    assert source.choice("abc") in "abc"
    assert source.randrange(1 << 40) >= 0
    while not source.is_empty:
        source.getrandbits(64)
    assert source.getrandbits(8) == 0
    assert source.randrange(10) == 0


def test_a_coordinator_keeps_no_more_after_twice_as_many_messages() -> None:
    """Of 1,000 and 2,000 messages it kept 106 and 110 KiB; in 400,000 of them the process grew by 0.7 MiB."""
    target = CoordinatorTarget(Random(1))

    def hear() -> int:
        for _ in range(NUM_HEARD):
            with contextlib.suppress(WireError):
                target.listen()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = hear()
        assert hear() - first < MAX_GROWTH_BYTES
    finally:
        tracemalloc.stop()
