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
from tests.fuzzing.__main__ import ALL, SLOW_S, ByteSource, run_seeds
from tests.fuzzing.targets import CoordinatorTarget, Target

from unbroken_core.vocabulary.errors import WireError

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


class Listener(Target):
    """Says of itself how long it took: one message in ten is slow, always or only the first time."""

    name = "listener"
    is_machine_slow = False
    has_been_slow = False

    def reset(self) -> None:
        """Nothing is kept."""

    def listen(self) -> None:
        """Take a number."""
        number = self.source.randrange(10)
        self.heard = f"number {number}"
        if number == 7 and not (self.is_machine_slow and type(self).has_been_slow):
            type(self).has_been_slow = True
            self.took_s = 2 * SLOW_S


class OnLoadedMachine(Listener):
    """Lost its processor once."""

    is_machine_slow = True
    has_been_slow = False


def test_a_slow_message_fails_the_run_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run_seeds(Listener, 4000, seed=1)
    said = capsys.readouterr().out
    assert "'number 7'; again: python -m tests.fuzzing --targets listener --seed 1 --messages" in said


def test_a_step_that_is_slow_only_once_is_the_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_seeds(OnLoadedMachine, 4000, seed=1)
    assert " 1 slow only once" in capsys.readouterr().out


@pytest.mark.timeout(400)
def test_a_coordinator_keeps_no_more_after_more_messages() -> None:
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
        hear()
        first = hear()
        # What it keeps goes up and down by a long text or two; what it never gives back only goes up.
        assert min(hear() for _ in range(3)) - first < MAX_GROWTH_BYTES
    finally:
        tracemalloc.stop()
