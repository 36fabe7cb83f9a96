"""Keeps a run alive as kubelet and operator would: restarts agents and rendezvous, replaces pods."""

import asyncio
import contextlib
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path

from unbroken.network.token import write_private
from unbroken.run.certificates import write_certificates
from unbroken.run.children import Child, Children
from unbroken.run.client import StatusClient
from unbroken.run.earlier import EarlierReports
from unbroken.run.flags import in_flags
from unbroken.run.loopback_block import LoopbackBlock
from unbroken.run.narration import Story, exit_code
from unbroken.run.options import RunOptions
from unbroken.run.pods import Pod, make_recipes
from unbroken_core.conventions.printable import printable
from unbroken_core.conventions.tls import client_context
from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.pod.liveness import ending_limit_s
from unbroken_core.protocol.messages import JobStatus, Observation
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import JobPhase, Role

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_RETRY_S = 0.1
_BAD_INPUT = 2
_STORM_STARTS = 5
_STORM_S = 30.0
_SIGNALS = 128
"""Exit codes from here on are those of a launcher that a signal has ended."""
_LAST_REPORT_S = 2.0
_LAST_LOOK_S = 2.0
"""How long a run that is told to end waits for its last status."""
_GRACE_S = 10.0
"""How long a part may take to end, beyond the termination grace."""
_UNRANKED_S = 20.0
"""How long a pod without ranks may go on once the job is over: nobody has trained in it."""


class Supervisor:
    """One run. All of it in one event loop, in the main thread."""

    def __init__(self, options: RunOptions, folder: Path, block: LoopbackBlock, memory: Path | None) -> None:
        self._options = options
        self._folder = folder
        self._block = block
        self._job_key = secrets.token_hex(32)
        job_key_file, reader_file = folder / "job-key", folder / "token"
        write_private(job_key_file, self._job_key)
        write_private(reader_file, self._token(Kind.READER))
        certificates = context = None
        if options.is_encrypted:
            settings = options.settings
            certificates = write_certificates(folder, block.rendezvous, settings.job, settings.namespace)
            context = client_context(certificates.authority.read_text())
        self._recipes = make_recipes(options, job_key_file, reader_file, block.rendezvous, certificates, memory=memory)
        self._children = Children()
        self._client = StatusClient(self._recipes.rendezvous_url, self._token(Kind.OPERATOR), context)
        self._rendezvous: Child | None = None
        self._pods: list[Pod] = []
        self._num_made = 0
        self._num_replaced = 0
        self._status: JobStatus | None = None
        self._story = Story(options.is_quiet)
        self._earlier = EarlierReports()
        self._is_news = asyncio.Event()
        """Set when the rendezvous needs a new observation."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = self._loop.create_future()
        """Exit code, once it is known."""
        self._counted = (0, 0)
        """Term and number of the newest recovery that was told."""
        self._is_over = False
        """Whether the rendezvous has ended the job: its launchers then end by themselves."""
        self._last_words: list[str] = []
        """What is said when all workers have ended."""
        self._num_interrupts = 0
        self._signal: int | None = None
        self._started_s = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def status(self) -> JobStatus | None:
        """The last status that was read."""
        return self._status

    @property
    def signal(self) -> int | None:
        """The first signal that asked this run to end, also where that was over already."""
        return self._signal

    def _token(self, kind: Kind, pod: str = "") -> str:
        return derive_token(self._job_key, kind, self._options.settings.uid, pod)

    async def run(self) -> int:
        """Run the job to its end; return 0 when it is complete, 1 when it failed, 128 + N after signal N."""
        for number in ENDING_SIGNALS:
            self._loop.add_signal_handler(number, self._interrupt, number)
        settings = self._options.settings
        spares = f", {settings.spares} spare" if settings.spares else ""
        pods = f"{counted(settings.replicas, 'pod')}"
        ranks = f"{counted(settings.ranks_per_pod, 'rank')}"
        self._say(f"job {settings.job}: {pods} x {ranks}{spares}")
        self._say(f"see it live: {shlex.join(self._recipes.page_command)}")
        self._say("`unbroken status` and `unbroken why` take the same options")
        kept = f"{self._options.log_dir}/<pod>/rank-<local rank>/<incarnation>.log"
        self._say(f"logs: {kept if self._options.log_dir is not None else 'here only; --log-dir DIR keeps them'}")
        try:
            self._keep(self._keep_rendezvous())
            for index in range(settings.replicas + settings.spares):
                role = Role.ACTIVE if index < settings.replicas else Role.SPARE
                self._start_pod(self._options.domains[index], role)
            self._keep(self._send_pods())
            self._keep(self._follow())
            code = await self._end
            if self._is_over:
                await self._wait_for_workers()
            else:
                await self._look_once_more()
            for line in [*self._story.end(self._status), *self._last_words]:
                self._say(line, is_news=True)
            return code if code != 1 else self._failed_code()
        finally:
            await self._clean_up()

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        """Run one part of the supervision; an exception is a bug and ends the run with its traceback."""

        def on_end(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and not self._end.done():
                self._end.set_exception(error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(on_end)

    def _finish(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)

    def _interrupt(self, number: int) -> None:
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            self._signal = number
            self._finish(128 + number)
            self._say(f"{signal.Signals(number).name}: ending the job; once more to kill it")
        else:
            for pod in self._pods:
                if pod.launcher is not None:
                    # Its workers are tied to it.
                    pod.launcher.signal(signal.SIGKILL)

    # ------------------------------------------------------------------------------------------------------ rendezvous

    async def _keep_rendezvous(self) -> None:
        """Start the rendezvous, again whenever it ends."""
        starts_s: list[float] = []
        while True:
            starts_s.append(time.monotonic())
            recipes = self._recipes
            environment = recipes.rendezvous_environment()
            child = self._children.start("rendezvous", recipes.rendezvous_command, environment, self._folder)
            self._rendezvous = child
            code = await child.ended
            if self._end.done():
                return
            if code == _BAD_INPUT:
                # It has reported why, and would fail again.
                self._finish(1)
                return
            if _is_storm(starts_s):
                self._say(
                    f"rendezvous ended {_STORM_STARTS} times within {_STORM_S:g} s ({_ending(code)}): giving up",
                    is_news=True,
                )
                self._finish(1)
                return
            self._say(f"rendezvous {_ending(code)}: started again")
            self._earlier.end()
            self._is_news.set()

    async def _send_pods(self) -> None:
        """Send the rendezvous an observation of the pods after every change."""
        while True:
            await self._is_news.wait()
            self._is_news.clear()
            pods = {pod.uid: pod.observation for pod in self._pods if not pod.is_over}
            # The workers of a pod that is over are tied to its launcher, which has ended.
            earlier = self._earlier.told(time.monotonic())
            observed = Observation(pods, is_accounted=True, earlier=earlier, counted=self._counted)
            if not await self._client.observe(observed):
                self._is_news.set()
                await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        """Show what the job does, until it is over."""
        while True:
            status = await self._client.newer_status(self._status, self._story.due_s(time.monotonic()))
            if status is None:
                await asyncio.sleep(_RETRY_S)
                continue
            if self._num_interrupts:
                # What ends now is meant to end: no faults.
                return
            lines = self._story.tell(status, time.monotonic())
            self._status = status
            self._earlier.note(status, time.monotonic())
            self._counted = max(
                [self._counted, *((status.term, one.number) for one in status.recoveries if one.ended_at)]
            )
            if status.phase in (JobPhase.COMPLETE, JobPhase.FAILED):
                # After all that the workers still write: it is what a person looks for at the end.
                self._last_words = lines
                lines = []
            for line in lines:
                self._say(line, is_news=True)
            if status.phase in (JobPhase.COMPLETE, JobPhase.FAILED):
                self._is_over = True
                self._finish(0 if status.phase is JobPhase.COMPLETE else 1)
                return
            limit, num_faults = self._options.max_faults, max((one.number for one in status.recoveries), default=0)
            if limit is not None and num_faults > limit:
                self._say(f"{counted(num_faults, 'fault')}: giving up", is_news=True)
                self._finish(1)
                return

    # ------------------------------------------------------------------------------------------------------------ pods

    def _start_pod(self, domains: tuple[str, ...], role: Role) -> None:
        name = f"{self._options.settings.job}-{self._num_made}"
        # A short path: that of a Unix socket has 107 bytes at most.
        folder = self._folder / str(self._num_made)
        folder.mkdir(mode=0o700)
        node = domains[-1] if domains else f"local-{self._num_made}"
        # All pods' lines go to one console, and some of them know of another pod its uid alone.
        pod = Pod(name, f"{name}-{secrets.token_hex(4)}", self._block.next_pod(), node, domains, role, folder)
        pod.private_folder.mkdir(mode=0o700)
        write_private(pod.token_file, self._token(Kind.AGENT, name))
        self._num_made += 1
        self._pods.append(pod)
        self._is_news.set()
        self._keep(self._keep_pod(pod))

    async def _keep_pod(self, pod: Pod) -> None:
        """Run a pod to its end: its agent is restarted, its launcher's end is the pod's."""
        pod.agent = self._start_agent(pod)
        recipes = self._recipes
        environment = recipes.launcher_environment(pod)
        launcher = self._children.start(
            f"{pod.name} launcher", recipes.launcher_command(), environment, self._options.work_folder
        )
        pod.launcher = launcher
        while launcher.is_alive:
            await asyncio.wait((pod.agent.ended, launcher.ended), return_when=asyncio.FIRST_COMPLETED)
            if launcher.ended.done():
                break
            if pod.agent.ended.result() == _BAD_INPUT:
                self._finish(1)
                return
            if _is_storm(pod.agent_starts_s):
                self._say(f"{pod.name}: its agent ended {_STORM_STARTS} times within {_STORM_S:g} s: ending the pod")
                launcher.signal(signal.SIGTERM)
                await launcher.ended
            else:
                self._report_agent(pod)
                pod.agent = self._start_agent(pod)
        await self._end_pod(pod, launcher.ended.result())

    def _start_agent(self, pod: Pod) -> Child:
        pod.agent_starts_s.append(time.monotonic())
        recipes = self._recipes
        environment = recipes.agent_environment(pod)
        return self._children.start(f"{pod.name} agent", recipes.agent_command, environment, self._folder)

    def _report_agent(self, pod: Pod) -> None:
        # With code 0 it ends when the work of its pod is over: the launcher's end follows.
        if pod.agent is not None and not self._end.done() and pod.agent.ended.result() != 0:
            self._say(f"{pod.name}: agent {_ending(pod.agent.ended.result())}: started again")

    async def _end_pod(self, pod: Pod, code: int) -> None:
        """A pod is over: replace it, unless the job is over as well."""
        if pod.agent is not None and 0 <= code < _SIGNALS:
            # The pod's last report says how its workers ended: it is to come before the pod's end.
            await asyncio.wait([pod.agent.ended], timeout=_LAST_REPORT_S)
        pod.is_over = True
        self._is_news.set()
        if pod.agent is not None:
            await self._children.stop([pod.agent], _GRACE_S)
        if (memory := self._recipes.memory_of(pod)) is not None:
            # As that of a lost host: nobody reads it any more, and it is free for the next pod.
            shutil.rmtree(memory, ignore_errors=True)
        if self._end.done() or await self._is_job_over():
            return
        if self._num_replaced >= self._options.max_replacements:
            replaced = counted(self._num_replaced, "pod was", "pods were")
            self._say(f"{pod.name} {_ending(code)}; {replaced} replaced, no more (--max-replacements)", is_news=True)
            if sum(not other.is_over for other in self._pods) < self._options.settings.minimum_replicas:
                self._finish(1)
            return
        self._num_replaced += 1
        self._say(f"{pod.name} {_ending(code)}: replaced by {self._options.settings.job}-{self._num_made}")
        self._start_pod(pod.domains, Role.SPARE)

    async def _look_once_more(self) -> None:
        """Learn where the time went until now, if the rendezvous is there."""
        with contextlib.suppress(asyncio.TimeoutError):
            self._status = await asyncio.wait_for(self._client.newer_status(None), _LAST_LOOK_S) or self._status

    async def _is_job_over(self) -> bool:
        """Ask the rendezvous whether the job is over: pods end before the last status is read."""
        status = await self._client.newer_status(None)
        return status is not None and status.phase in (JobPhase.ENDING, JobPhase.COMPLETE, JobPhase.FAILED)

    # ------------------------------------------------------------------------------------------------------------- end

    async def _wait_for_workers(self) -> None:
        """Wait for the launchers, which end by themselves after the job, once their workers have."""
        timeouts = self._options.settings.timeouts
        limit_s = ending_limit_s(timeouts) + timeouts.termination_grace_s + _GRACE_S
        told = () if self._status is None else self._status.pods
        ranked, now_s = {pod.uid for pod in told if pod.ranks}, time.monotonic()
        until_s = {
            pod.launcher.ended: now_s + (limit_s if pod.uid in ranked else min(limit_s, _UNRANKED_S))
            for pod in self._pods
            if pod.launcher is not None and pod.launcher.is_alive
        }
        alive = list(until_s)
        while alive and self._num_interrupts == 0:
            _, waiting = await asyncio.wait(alive, timeout=0.5)
            # A pod that stands still, or that woke up in an iteration which is over, would hold all up for minutes.
            alive = [ended for ended in waiting if time.monotonic() < until_s[ended]]

    def _failed_code(self) -> int:
        """Return the exit code of the first pod that says why the job has failed."""
        ended = (pod.launcher.ended for pod in self._pods if pod.launcher is not None)
        found = next((code.result() for code in ended if code.done() and code.result() > 1), 1)
        return found if found != 1 or self._status is None else exit_code(self._status)

    async def _clean_up(self) -> None:
        if not self._end.done():
            self._end.cancel()
        grace_s = self._options.settings.timeouts.termination_grace_s + _GRACE_S
        await self._children.stop([pod.launcher for pod in self._pods if pod.launcher is not None], grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        agents = [pod.agent for pod in self._pods if pod.agent is not None]
        for agent in agents:
            # Their pods are gone: there is nothing left to report.
            agent.signal(signal.SIGKILL)
        rest = [*agents, *([self._rendezvous] if self._rendezvous is not None else [])]
        await self._children.stop(rest, _GRACE_S)
        await self._client.close()
        await self._children.kill_leftovers()

    def _say(self, text: str, *, is_news: bool = False) -> None:
        """Tell the user; news is told also where quiet is wanted."""
        if is_news or not self._options.is_quiet:
            since_s = time.monotonic() - self._started_s
            try:
                print(f"unbroken {since_s:7.2f}s  {printable(in_flags(text))}", file=sys.stderr, flush=True)
            except OSError:
                # The terminal is gone. A run that was told to end goes on to end.
                if not self._num_interrupts:
                    raise


def _is_storm(starts_s: list[float]) -> bool:
    """Whether there were too many starts lately for another one."""
    now_s = time.monotonic()
    return sum(now_s - start_s < _STORM_S for start_s in starts_s) >= _STORM_STARTS


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
