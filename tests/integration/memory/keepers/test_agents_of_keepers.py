"""Real agents with their keepers at a real rendezvous, whose coordinator the test is as far as copies go."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from tests.waiting import eventually

from unbroken.network.peer import FrameWriter as Connection
from unbroken.network.refusals import Refusals
from unbroken.network.token import JobKeyFile, write_private
from unbroken.rendezvous.server import Server
from unbroken.rendezvous.service import Service
from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import Close, Send
from unbroken_core.protocol.messages import (
    Buddies,
    Heartbeat,
    Hello,
    Observation,
    PodObservation,
    RendezvousMessage,
    Report,
    Welcome,
)
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import settings_to_json
from unbroken_core.vocabulary.checkpoints import Held, Peer

from .keeper_pods import KeeperPod, assert_is, load, save

KEY, UID = "k" * 64, "job-uid"
SETTINGS = JobSettings("digits", uid=UID, replicas=2, ranks_per_pod=2)


class CopyingService(Service):
    """A rendezvous in whose job checkpoints are copied once; the test says to whom."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.held: dict[str, Held] = {}
        self._of_pods: dict[str, Connection] = {}

    def join(self, hello: Hello, transport: asyncio.WriteTransport, can_halt: bool = False) -> Connection:
        if hello.memory is not None:
            self.held[hello.pod] = hello.memory
        peer = super().join(hello, transport, can_halt)
        self._of_pods[hello.pod] = peer
        return peer

    def receive(self, peer: Connection, message: Report | Heartbeat) -> None:
        if isinstance(message, Report) and message.memory is not None:
            self.held[peer.pod] = message.memory
        super().receive(peer, message)

    def _perform(self, actions: Sequence[Send | Close]) -> None:
        super()._perform([_with_copies(one) for one in actions])

    def tell(self, pod: str, message: RendezvousMessage) -> None:
        """Send to a pod's agent."""
        super()._perform([Send(self._of_pods[pod].session, message)])

    def peer(self, pod: str) -> Peer:
        """Return where a pod's keeper says that it is reached."""
        held = self.held[pod]
        return Peer(f"uid-of-{pod}", held.host, held.port)


def _with_copies(action: Send | Close) -> Send | Close:
    if isinstance(action, Send) and isinstance(action.message, Welcome):
        return replace(action, message=replace(action.message, copies=1))
    return action


class AgentPod(KeeperPod):
    """A pod with an agent, which starts its keeper."""

    def __init__(self, name: str, host: str) -> None:
        super().__init__(f"uid-of-{name}", host)
        self.name = name
        self.agent: subprocess.Popen[bytes] | None = None

    def start_agent(self, url: str) -> None:
        """Start the agent."""
        write_private(self.folder / "token", derive_token(KEY, Kind.AGENT, UID, self.name))
        environment = {
            **os.environ,
            "UNBROKEN_SETTINGS": settings_to_json(SETTINGS),
            "UNBROKEN_TOKEN_FILE": str(self.folder / "token"),
            "UNBROKEN_RENDEZVOUS_URL": url,
            "UNBROKEN_POD": self.name,
            "UNBROKEN_POD_UID": self.uid,
            "UNBROKEN_POD_IP": self.host,
            "UNBROKEN_DIR": str(self.folder),
            "UNBROKEN_MEMORY_DIR": str(self.root),
            "UNBROKEN_MEMORY_LIMIT": str(self.limit_bytes),
            "UNBROKEN_MEMORY_PORT": "29603",
        }
        with (self.folder / "stderr").open("ab") as errors:
            self.agent = subprocess.Popen([sys.executable, "-m", "unbroken.agent"], env=environment, stderr=errors)

    def kill_keeper(self) -> None:
        """Kill the keeper alone."""
        assert self.agent is not None
        (keeper,) = psutil.Process(self.agent.pid).children()
        keeper.kill()

    def kill_agent(self) -> None:
        """Kill the agent, and so its keeper."""
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait()

    def close(self) -> None:
        """End all."""
        if self.agent is not None:
            self.kill_agent()
        for folder in (self.folder, self.root):
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pods() -> Iterator[list[AgentPod]]:
    made = [AgentPod(f"digits-{index}", f"127.0.0.{51 + index}") for index in range(3)]
    yield made
    for pod in made:
        pod.close()


@contextlib.asynccontextmanager
async def rendezvous(folder: Path, port: int = 0) -> AsyncIterator[tuple[CopyingService, str, int]]:
    """Serve in this process."""
    write_private(folder / "job-key", KEY)
    refusals = Refusals()
    service = CopyingService(Coordinator(SETTINGS, asyncio.get_running_loop().time()), refusals)
    # Nobody is vouched for whom the operator has not named.
    pods = {f"uid-of-digits-{index}": PodObservation(f"digits-{index}", f"node-{index}", ()) for index in range(3)}
    service.observe(Observation(pods))
    runner = web.AppRunner(Server(service, JobKeyFile(folder / "job-key", UID), refusals).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    port = runner.addresses[0][1]
    try:
        yield service, f"http://127.0.0.1:{port}", port
    finally:
        service.close()
        await runner.cleanup()


def introduce(service: CopyingService, owner: AgentPod, holder: AgentPod) -> None:
    """Tell two agents what their keepers are to each other."""
    service.tell(holder.name, Buddies(service.term, owners=(owner.uid,)))
    service.tell(owner.name, Buddies(service.term, (service.peer(holder.name),)))


async def until_reachable(service: CopyingService, *pods: AgentPod) -> None:
    """Wait until agents say where their keepers are."""

    async def are_reachable() -> bool:
        return all(service.held.get(pod.name, Held("")).port for pod in pods)

    await eventually(are_reachable, "ports", describe=lambda: "".join(pod.errors() for pod in pods))


async def until_kept(service: CopyingService, owner: AgentPod, holder: AgentPod, step: int) -> None:
    """Wait until the holder's agent tells of a copy."""

    async def is_kept() -> bool:
        return any((one.owner, one.step) == (owner.uid, step) for one in service.held[holder.name].copies)

    await eventually(is_kept, f"a copy of step {step}", describe=lambda: owner.errors() + holder.errors())


def test_agents_carry_what_their_keepers_need_and_tell_what_these_have(
    pods: list[AgentPod], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also to a keeper, an agent and a rendezvous that was started again; then a third pod restores."""
    owner, holder, spare = pods

    async def scenario() -> None:
        async with rendezvous(tmp_path) as (service, url, port):
            for pod in (owner, holder):
                pod.start_agent(url)
            await until_reachable(service, owner, holder)
            assert service.peer(holder.name) == Peer(holder.uid, holder.host, 29603)
            introduce(service, owner, holder)
            await asyncio.to_thread(save, monkeypatch, owner, 1)
            await until_kept(service, owner, holder, 1)
            # A keeper that was killed is told all anew, with a certificate for its new key.
            owner.kill_keeper()
            holder.kill_keeper()
            await asyncio.to_thread(save, monkeypatch, owner, 2)
            await until_kept(service, owner, holder, 2)
            # A new agent knows nothing, and the coordinator tells it after its Hello.
            holder.kill_agent()
            service.held.clear()
            holder.start_agent(url)
            await until_reachable(service, holder)
            service.tell(holder.name, Buddies(service.term, owners=(owner.uid,)))
            await asyncio.to_thread(save, monkeypatch, owner, 3)
            await until_kept(service, owner, holder, 3)
        async with rendezvous(tmp_path, port) as (service, url, _):
            # The rendezvous was started again: certificates of the one before it are as good.
            await until_reachable(service, owner, holder)
            await asyncio.to_thread(save, monkeypatch, owner, 4)
            await until_kept(service, owner, holder, 4)
            introduce(service, owner, holder)
            owner.close()
            owner.agent = None
            spare.start_agent(url)
            await until_reachable(service, spare)
            holder.held = service.held[holder.name]
            step, state = await asyncio.to_thread(load, monkeypatch, spare, 4, holder)
            assert step == 4
            assert_is(state, 4)

    asyncio.run(scenario())
