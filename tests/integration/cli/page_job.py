"""A job whose rendezvous is the real process, and whose pods are connections that obey it: no workers, no torch."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import (
    PROTOCOL,
    Fault,
    Hello,
    Interrupt,
    Plan,
    RendezvousMessage,
    Report,
    WorkerState,
)
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

TOKEN = "0123456789abcdef0123456789abcdef"
_RETRY_S = 0.05
"""Pace at which a pod comes again, as an agent's: no test waits for it."""
_LIMIT_S = 60.0


@dataclass
class _Pod:
    name: str
    domains: tuple[str, ...]
    states: list[WorkerState]
    plan: Plan | None = None
    connection: aiohttp.ClientWebSocketResponse | None = None
    seq: int = 0
    is_gone: bool = False


@dataclass
class PageJob:
    """The rendezvous, and its pods in a thread of their own."""

    settings: JobSettings
    listen: str
    folder: Path
    environment: Mapping[str, str]
    pods: dict[str, _Pod] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    @property
    def url(self) -> str:
        """Of the rendezvous."""
        return f"http://{self.listen}"

    def start(self) -> None:
        """Start the rendezvous, anew where one was killed."""
        self.process = subprocess.Popen([sys.executable, "-m", "unbroken.rendezvous"], env=self.environment)

    def kill(self) -> None:
        """SIGKILL the rendezvous."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(_LIMIT_S)

    def join(self, name: str, *domains: str) -> None:
        """Let a pod with READY workers join, and come again whenever its connection breaks."""
        states = [
            WorkerState(local_rank, 0, WorkerPhase.READY, host="127.0.0.1", port=1)
            for local_rank in range(self.settings.ranks_per_pod)
        ]
        pod = self.pods[name] = _Pod(name, domains, states)
        asyncio.run_coroutine_threadsafe(self._live(pod), self.loop)

    def fail(self, name: str, local_rank: int, detail: str, stack: tuple[str, ...]) -> None:
        """Let a worker raise an exception."""
        self._do(self._fail(self.pods[name], local_rank, detail, stack))

    def fail_all(self, name: str, *details: str) -> None:
        """Let all workers of a pod raise an exception at once."""
        pod = self.pods[name]
        for place, (state, detail) in enumerate(zip(pod.states, details, strict=True)):
            fault = Fault(Cause.EXCEPTION, state.iteration, detail)
            pod.states[place] = replace(state, phase=WorkerPhase.STOPPING, fault=fault)
        self._do(self._report(pod))

    def leave(self, name: str) -> None:
        """Let a pod say that it was told to end, and end."""
        self._do(self._leave(self.pods[name]))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self.loop).result(_LIMIT_S)

    async def _fail(self, pod: _Pod, local_rank: int, detail: str, stack: tuple[str, ...]) -> None:
        state = pod.states[local_rank]
        fault = Fault(Cause.EXCEPTION, state.iteration, detail, stack=stack)
        pod.states[local_rank] = replace(state, phase=WorkerPhase.STOPPING, fault=fault)
        await self._report(pod)

    async def _leave(self, pod: _Pod) -> None:
        pod.is_gone = True
        await self._report(pod, is_leaving=True)
        if pod.connection is not None:
            await pod.connection.close()

    async def _live(self, pod: _Pod) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            while not pod.is_gone:
                with suppress(aiohttp.ClientError, OSError):
                    async with session.ws_connect(f"{self.url}/v1/agents") as connection:
                        pod.connection = connection
                        await connection.send_str(wire.encode(self._hello(pod)))
                        async for frame in connection:
                            await self._obey(pod, wire.decode(frame.data, RendezvousMessage))
                pod.connection = None
                await asyncio.sleep(_RETRY_S)

    def _hello(self, pod: _Pod) -> Hello:
        pod.seq = 0
        term = 0 if pod.plan is None else pod.plan.term
        size, node = self.settings.ranks_per_pod, pod.domains[-1]
        return Hello(
            PROTOCOL,
            self.settings.job,
            pod.name,
            f"uid-{pod.name}",
            "s",
            node,
            size,
            pod.domains,
            term,
            pod.plan,
            tuple(pod.states),
        )

    async def _obey(self, pod: _Pod, message: Any) -> None:
        if isinstance(message, Plan):
            pod.plan = message
            for part in message.ranks:
                phase = WorkerPhase.READY if part.rank is None else WorkerPhase.RUNNING
                state = replace(pod.states[part.local_rank], phase=phase, fault=None, iteration=message.iteration)
                pod.states[part.local_rank] = state
        elif isinstance(message, Interrupt):
            pod.states = [replace(state, phase=WorkerPhase.READY, fault=None) for state in pod.states]
        else:
            return
        await self._report(pod)

    async def _report(self, pod: _Pod, is_leaving: bool = False) -> None:
        pod.seq += 1
        if pod.connection is not None:
            await pod.connection.send_str(wire.encode(Report(pod.seq, tuple(pod.states), is_leaving)))


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def page_job(settings: JobSettings, host: str, folder: Path) -> Iterator[PageJob]:
    """Start the rendezvous of a job without pods; end all afterwards."""
    (folder / "token").write_text(TOKEN)
    environment = {
        **os.environ,
        "UNBROKEN_SETTINGS": wire.settings_to_json(settings),
        "UNBROKEN_TOKEN_FILE": str(folder / "token"),
        "UNBROKEN_LISTEN": f"{host}:29600",
        "UNBROKEN_LOG_LEVEL": "WARNING",
    }
    job = PageJob(settings, f"{host}:29600", folder, environment)
    thread = threading.Thread(target=job.loop.run_forever)
    thread.start()
    job.start()
    try:
        yield job
    finally:
        job.kill()
        asyncio.run_coroutine_threadsafe(_end_tasks(), job.loop).result(_LIMIT_S)
        job.loop.call_soon_threadsafe(job.loop.stop)
        thread.join(_LIMIT_S)
        job.loop.run_until_complete(job.loop.shutdown_asyncgens())
        job.loop.close()
