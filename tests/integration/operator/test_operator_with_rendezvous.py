"""The operator's client against the real rendezvous."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import eventually

from unbroken_core.messages import Observation, PodObservation
from unbroken_core.reasons import JobPhase, Role
from unbroken_core.wire import settings_to_json
from unbroken_operator import layout
from unbroken_operator.admission import Accepted, admit
from unbroken_operator.errors import RendezvousUnreachable
from unbroken_operator.rendezvous_client import RendezvousClient, Target

TOKEN = "0123456789abcdef" * 4
LIMIT_S = 60.0
JOB = {
    "metadata": {"name": "digits", "namespace": "ml", "uid": "uid-of-digits"},
    "spec": {
        "replicas": 2,
        "topology": {"layers": [{"name": "rack", "label": "example.com/rack"}]},
        "template": {"spec": {"containers": [{"name": "t", "image": "torch:2", "command": ["python3", "t.py"]}]}},
    },
}


@contextlib.contextmanager
def rendezvous(folder: Path) -> Iterator[str]:
    """Run `python -m unbroken.rendezvous` for JOB on an address of its own; yields the address."""
    verdict = admit(JOB)
    assert isinstance(verdict, Accepted)
    (folder / "token").write_text(TOKEN)
    address = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}.254"
    environment = {
        **os.environ,
        "UNBROKEN_SETTINGS": settings_to_json(verdict.settings),
        "UNBROKEN_TOKEN_FILE": str(folder / "token"),
        "UNBROKEN_LISTEN": f"{address}:{layout.API_PORT}",
        "UNBROKEN_METRICS_LISTEN": f"{address}:{layout.METRICS_PORT}",
    }
    log = folder / "rendezvous.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "unbroken.rendezvous"], env=environment, stdout=output, stderr=output
        )
    try:
        yield address
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(30)


async def is_listening(address: str) -> bool:
    """Return whether somebody listens there."""
    with socket.socket() as probe:
        probe.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(probe, (address, layout.API_PORT))
        except OSError:
            return False
    return True


def test_the_client_reads_the_status_and_brings_the_observation(tmp_path: Path) -> None:
    async def scenario(address: str) -> None:
        await eventually(lambda: is_listening(address), "a rendezvous")
        target = Target("uid", "digits-rendezvous-0", address, TOKEN)
        async with RendezvousClient() as client:
            first = await client.status(target, None)
            assert (first.job, first.phase, first.pods) == ("digits", JobPhase.FORMING, ())
            await client.observe(target, Observation({"u": PodObservation("digits-0", "a", ("r1",), Role.ACTIVE)}))
            # The same revision again is an answer, too: the poll is bounded.
            again = await client.status(target, None)
            assert again.generation == first.generation

    with rendezvous(tmp_path) as address:
        asyncio.run(scenario(address))


def test_a_wrong_token_is_named_as_the_reason(tmp_path: Path) -> None:
    async def scenario(address: str) -> None:
        await eventually(lambda: is_listening(address), "a rendezvous")
        async with RendezvousClient() as client:
            with pytest.raises(RendezvousUnreachable, match="refuses the token"):
                await client.status(Target("uid", "digits-rendezvous-0", address, "wrong"), None)

    with rendezvous(tmp_path) as address:
        asyncio.run(scenario(address))


def test_a_rendezvous_that_is_down_is_told_in_one_sentence() -> None:
    async def scenario() -> None:
        async with RendezvousClient() as client:
            with pytest.raises(
                RendezvousUnreachable,
                match=r"digits-rendezvous-0 at http://127\.0\.0\.77:29600 cannot be reached: connection refused$",
            ):
                await client.status(Target("uid", "digits-rendezvous-0", "127.0.0.77", TOKEN), None)

    asyncio.run(scenario())
