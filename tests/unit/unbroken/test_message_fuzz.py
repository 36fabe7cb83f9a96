"""Whatever is said to them, those who listen take it or refuse it, and what they say keeps to its bounds.

A few messages; `make soak` sends a million.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzzing.__main__ import ALL, ByteSource

MOST_STEPS = 40


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
