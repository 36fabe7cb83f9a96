"""What one job may cost: token buckets, and the pace at which its rendezvous is asked."""

import asyncio
import dataclasses
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.unbroken_operator.operator_world import running_world
from tests.unit.unbroken_operator.virtual_time import run

from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.adapters.errors import RendezvousUnreachable
from unbroken_operator.adapters.poller import Poller
from unbroken_operator.adapters.rendezvous_client import RendezvousApi, RendezvousTarget, SoundReport
from unbroken_operator.decisions.limits.budgets import POLLS, Allowance, full, left, spend, wait_s
from unbroken_operator.decisions.limits.report import ReportLimits

TARGET = RendezvousTarget("uid", "digits-rendezvous-0", "127.0.0.1", "token")
WATCHED_S = 300.0


@given(
    burst=st.floats(1, 1e6),
    per_s=st.floats(1e-3, 1e6),
    steps=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e9)), max_size=30),
)
def test_nobody_spends_more_than_the_burst_and_what_came_since(
    burst: float, per_s: float, steps: list[tuple[float, float]]
) -> None:
    allowance, now_s, spent = Allowance(burst, per_s), 0.0, 0.0
    bucket = full(allowance, now_s)
    for passed_s, wanted in steps:
        now_s += passed_s
        amount = min(wanted, max(0.0, left(bucket, allowance, now_s)))
        bucket, spent = spend(bucket, allowance, amount, now_s), spent + amount
        assert spent <= (burst + now_s * per_s) * (1 + 1e-9)
        assert 0.0 <= wait_s(bucket, allowance, now_s) <= (burst + 1.0) / per_s


def test_a_clock_that_goes_back_gives_nothing() -> None:
    allowance = Allowance(burst=5, per_s=1.0)
    bucket = spend(full(allowance, 100.0), allowance, 5, 100.0)
    assert (left(bucket, allowance, 50.0), wait_s(bucket, allowance, 100.0)) == (0.0, 1.0)
    assert wait_s(bucket, allowance, 100.0, amount=1e9) == 5.0, "nobody waits for more than a bucket holds"


class Hasty:
    """A rendezvous that answers at once, as the test says: news, the same again, nothing of use, or all in turn."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        report = running_world().report
        assert report is not None
        self._report = report
        self.num_asked = 0

    def is_token_old(self, target: RendezvousTarget) -> bool:
        """No key was replaced."""
        return False

    async def status(self, _target: RendezvousTarget, _after: JobStatus | None, _limits: ReportLimits) -> SoundReport:
        """See RendezvousApi."""
        self.num_asked += 1
        if self._kind == "errors" or (self._kind == "all in turn" and self.num_asked % 2):
            raise RendezvousUnreachable("302")
        phase = JobPhase.RUNNING if self._kind == "the same" or self.num_asked % 4 else JobPhase.INTERRUPTED
        return SoundReport(dataclasses.replace(self._report, phase=phase), 1000)


@pytest.mark.parametrize("kind", ["news", "the same", "errors", "all in turn"])
def test_a_rendezvous_is_asked_seldom_however_fast_it_answers(kind: str) -> None:
    """One that answers at once drove 1,850 polls a second."""

    async def scenario() -> None:
        server = Hasty(kind)
        poller = Poller(cast(RendezvousApi, server), lambda: None, "ml/digits")
        poller.follow(TARGET)
        for _ in range(int(WATCHED_S)):
            await asyncio.sleep(1.0)
            # Nor does it help to be doubted, or to be another one.
            poller.doubt()
        assert server.num_asked <= POLLS.burst + WATCHED_S * POLLS.per_s
        await poller.stop()

    run(scenario())


def test_the_changes_of_a_recovery_are_asked_for_at_once() -> None:
    async def scenario() -> None:
        server = Hasty("news")
        poller = Poller(cast(RendezvousApi, server), lambda: None, "ml/digits")
        await asyncio.sleep(60.0)
        poller.follow(TARGET)
        await asyncio.sleep(0.1)
        assert server.num_asked == POLLS.burst
        await poller.stop()

    run(scenario())
