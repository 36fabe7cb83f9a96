"""The status for the live page: written once for all who look."""

import asyncio

from unbroken.network.refusals import Refusals
from unbroken.rendezvous.page import Snapshots
from unbroken.rendezvous.service import Service
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.protocol.settings import JobSettings


def test_status_is_written_once_for_all_who_look_at_the_same_moment() -> None:
    async def scenario() -> None:
        service = Service(Coordinator(JobSettings("digits"), asyncio.get_running_loop().time()), Refusals())
        snapshots = Snapshots(service)
        bodies = await asyncio.gather(*(snapshots.newer(-1, -1, 0.0) for _ in range(50)))
        assert len({id(body) for body in bodies}) == 1
        assert b'"job":"digits"' in bodies[0]
        service.close()

    asyncio.run(scenario())
