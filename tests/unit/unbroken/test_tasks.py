"""No background task ends in silence."""

import asyncio

import pytest

from unbroken.network.refusals import Refusals
from unbroken.rendezvous.service import Service
from unbroken.rounds.server import Rounds, _Run
from unbroken.tasks import Tasks
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.protocol.messages import PROTOCOL, Hello
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.torchrun_rounds.rounds import RunRounds


def test_failed_task_is_logged_with_what_it_served_and_its_owner_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, str]] = []

    async def fail() -> None:
        raise OverflowError("too large")

    async def wait() -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        tasks = Tasks(lambda what, error: told.append((what, str(error))))
        failing = tasks.start("pod digits-0", fail())
        tasks.start("pod digits-1", wait())
        await asyncio.wait((failing,))
        await asyncio.sleep(0)
        assert len(tasks) == 1
        await tasks.stop()
        assert len(tasks) == 0

    asyncio.run(scenario())
    assert told == [("pod digits-0", "too large")]
    (record,) = caplog.records
    assert record.getMessage() == "task failed: what=pod digits-0 error=OverflowError: too large"
    assert record.exc_info


class BrokenTransport(asyncio.WriteTransport):
    """A transport that cannot be written."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: object) -> None:
        raise OverflowError("cannot write")

    def close(self) -> None:
        raise OverflowError("cannot close")


def test_coordinator_whose_orders_cannot_be_sent_ends_its_process(caplog: pytest.LogCaptureFixture) -> None:
    """Else its next tick would never be set, and the job would stand still without a word."""

    async def scenario() -> None:
        settings = JobSettings("digits")
        service = Service(Coordinator(settings, asyncio.get_running_loop().time()), Refusals())
        service.join(Hello(PROTOCOL, "digits", "digits-0", "uid-0", "s", "node-0", 1), BrokenTransport())
        assert service.failure.done()
        with pytest.raises(OverflowError, match="cannot write"):
            service.failure.result()

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == ["coordinator failed: job=digits event=AgentJoined"]


def test_run_whose_rounds_cannot_be_kept_begins_anew_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def keep(_past: object) -> None:
        raise OverflowError("too large")

    async def scenario() -> None:
        rounds = Rounds(Refusals(), {}, keep)
        broken, other = _Run(RunRounds((4, 2))), _Run(RunRounds((-1, 0)))
        rounds._runs.update(broken=broken, other=other)
        rounds._settle("broken", broken)
        assert list(rounds._runs) == ["other"]
        rounds.close()

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == ["run failed, starting over: run=broken"]
