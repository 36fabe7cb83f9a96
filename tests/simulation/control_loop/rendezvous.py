"""Rendezvous pods in virtual time, and what the operator's client of them sees.

Modelled after `unbroken.rendezvous` and its standby: the coordinator itself is the product's. Only one process leads at
a time here: one that begins while another one, which its agents still reach, has yet to end waits for that.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unbroken_core.protocol.messages import Earlier, JobStatus, Observation
from unbroken_core.protocol.wire import decode, encode
from unbroken_operator.adapters.errors import RendezvousUnreachable, ReportRefused
from unbroken_operator.adapters.rendezvous_client import ANSWER_TIMEOUT_S, POLL_S, RendezvousTarget, SoundReport
from unbroken_operator.decisions.limits.report import ABSOLUTE, ReportLimits, read_report

from .api_server import JsonObject

if TYPE_CHECKING:
    from tests.simulation.control_loop.loop_world import ControlLoopWorld
    from tests.simulation.control_loop.operators import OperatorProcess

GATHER_S = 0.05


@dataclass
class RendezvousProcess:
    """The container of one rendezvous pod."""

    name: str
    uid: str
    ip: str
    earlier: Earlier
    stands_by: bool
    """Whether it has yet to be told to lead."""
    is_up: bool = True
    is_over: bool = False
    is_isolated: bool = False
    """Whether nobody reaches it."""
    kept: tuple[int, int] = (0, -1)
    """Term and iteration in its file, which outlives the container."""
    num_restarts: int = 0
    num_lives: int = 0
    """How often its machine went down under it."""
    settings: str = field(default="", repr=False)


class RendezvousPods:
    """All rendezvous processes; `leader` is the one with the coordinator."""

    def __init__(self, world: ControlLoopWorld) -> None:
        self.world = world
        self.random = random.Random(f"rendezvous {world.schedule.seed}")
        self.by_uid: dict[str, RendezvousProcess] = {}
        self.leader: RendezvousProcess | None = None
        self.pollers: list[Poll] = []
        self.is_notifying = False
        self.began_at_s = 0.0
        """When the one that leads began to."""

    # ------------------------------------------------------------------------------------------------------- processes

    def begin(self, item: JsonObject, ip: str) -> None:
        """Start a pod's container."""
        metadata = item["metadata"]
        process = self.by_uid.get(metadata["uid"])
        if process is None:
            container = item["spec"]["containers"][0]
            variables = {entry["name"]: entry.get("value", "") for entry in container["env"]}
            said = variables.get("UNBROKEN_EARLIER")
            process = RendezvousProcess(
                metadata["name"],
                metadata["uid"],
                ip,
                decode(said, Earlier) if said else Earlier(),
                container["command"][-1].endswith("standby"),
                settings=variables["UNBROKEN_SETTINGS"],
            )
            self.by_uid[process.uid] = process
        process.is_up = True
        self._probe(process)
        if not process.stands_by:
            self._lead(process)

    def _probe(self, process: RendezvousProcess) -> None:
        def passed() -> None:
            if process.is_up and not process.is_over:
                self.world.machines.readiness(process.uid, is_ready=True, num_restarts=process.num_restarts)

        self.world.after(self.random.uniform(0.2, 2.5), passed, "")

    def _lead(self, process: RendezvousProcess) -> None:
        if not process.is_up or process.is_over or self.leader is process:
            return
        other = self.leader
        if other is not None and not other.is_isolated:
            self.world.after(0.1, lambda: self._lead(process), "")
            return
        if other is not None:
            self._lose_leader()
        self.leader, self.began_at_s = process, self.world.now_s
        process.stands_by = False
        self.world.begin_coordinator(process)

    def _lose_leader(self) -> None:
        process, self.leader = self.leader, None
        if process is not None:
            process.kept = max(process.kept, self.world.end_coordinator())
        self.notify()

    def crash(self, process: RendezvousProcess, down_s: float) -> None:
        """End its container, which its kubelet starts again."""
        if not process.is_up or process.is_over:
            return
        process.is_up = False
        process.num_restarts += 1
        if self.leader is process:
            self._lose_leader()
        self.world.machines.readiness(process.uid, is_ready=False, num_restarts=process.num_restarts)

        lives = process.num_lives

        def restart() -> None:
            if not process.is_over and process.num_lives == lives:
                process.is_up = True
                self._probe(process)
                if not process.stands_by:
                    self._lead(process)

        self.world.after(down_s, restart, f"the container of {process.name} is back")

    def stop(self, uid: str, *, is_for_good: bool) -> None:
        """End a process: for good, or until its machine is back."""
        process = self.by_uid.get(uid)
        if process is None or process.is_over:
            return
        process.is_up, process.is_over = False, is_for_good
        process.num_lives += 1
        if self.leader is process:
            self._lose_leader()

    def isolate(self, uid: str, *, is_on: bool) -> None:
        """Let nobody reach it."""
        process = self.by_uid.get(uid)
        if process is not None:
            process.is_isolated = is_on
            if is_on and self.leader is process:
                # To a coordinator that hears nobody, all pods look lost.
                self.world.guilty_pods.update(self.world.pods)
                self.world.break_all_connections()
            if not is_on and not process.stands_by and self.leader is None:
                self._lead(process)  # It never ceased to, when another one was told to lead meanwhile, and has ended.
            self.notify()

    # --------------------------------------------------------------------------------------------------- its listeners

    def find(self, target: RendezvousTarget) -> RendezvousProcess | None:
        """Return the process at an address."""
        process = self.by_uid.get(target.pod_uid)
        return process if process is not None and process.ip == target.address else None

    def note_step(self) -> None:
        """Take in that the coordinator has made a step."""
        leader = self.leader
        if leader is None or self.world.coordinator is None:
            return
        leader.kept = max(leader.kept, self.world.coordinator.past)
        if self.pollers and not self.is_notifying:
            self.is_notifying = True
            self.world.after(GATHER_S, self._notified, "")

    def _notified(self) -> None:
        self.is_notifying = False
        self.notify()

    def notify(self) -> None:
        """Answer those who wait for a newer status."""
        for poll in list(self.pollers):
            poll.look()


class Poll:
    """A question for the status that waits for its answer."""

    def __init__(
        self, world: ControlLoopWorld, target: RendezvousTarget, after: JobStatus | None, future: asyncio.Future[Any]
    ) -> None:
        self.world, self.target, self.after, self.future = world, target, after, future
        self.until_s = world.now_s + (0.0 if after is None else POLL_S)

    def look(self) -> None:
        """Answer if there is an answer."""
        world, rendezvous = self.world, self.world.rendezvous
        process = rendezvous.find(self.target)
        if process is None or process.is_isolated or self.future.done():
            return self._leave()
        coordinator = world.coordinator
        if not process.is_up or rendezvous.leader is not process or coordinator is None:
            self._leave()
            why = "503: this rendezvous stands by" if process.is_up else "connection reset"
            return self._answer(RendezvousUnreachable(f"{process.name}: {why}"))
        after = self.after
        is_newer = after is None or coordinator.term != after.term or coordinator.revision > after.revision
        if is_newer or world.now_s >= self.until_s:
            self._leave()
            self._answer(SoundReport(coordinator.status(world.now_s, world.wall), 1000))
        return None

    def _leave(self) -> None:
        if self in self.world.rendezvous.pollers:
            self.world.rendezvous.pollers.remove(self)

    def _answer(self, result: Any) -> None:
        def arrive() -> None:
            if self.future.done():
                return
            if isinstance(result, Exception):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)

        self.world.after(self.world.rendezvous.random.uniform(0.0005, 0.01), arrive, "")


class RendezvousClient:
    """What an operator has in place of `RendezvousApi`."""

    def __init__(self, world: ControlLoopWorld, process: OperatorProcess) -> None:
        self._world, self._process = world, process

    def is_token_old(self, _target: RendezvousTarget | None) -> bool:
        """See RendezvousApi."""
        return False

    async def status(
        self, target: RendezvousTarget, after: JobStatus | None, limits: ReportLimits = ABSOLUTE
    ) -> SoundReport:
        """See RendezvousApi."""
        future = self._future(POLL_S + 4.0 if after is not None else ANSWER_TIMEOUT_S)
        world = self._world

        def arrive() -> None:
            if not self._is_lost(target, future):
                poll = Poll(world, target, after, future)
                world.rendezvous.pollers.append(poll)
                world.after(poll.until_s - world.now_s, poll.look, "")
                poll.look()

        self._travel(arrive)
        reading: SoundReport = await future
        if world.is_thorough:
            self._check(reading.status, limits)
        return reading

    def _check(self, status: JobStatus, limits: ReportLimits) -> None:
        """What a rendezvous of ours reports passes the operator's limits, and is the same afterwards."""
        text = encode(status).encode()
        try:
            read = read_report(text, limits)
        except Exception as error:
            self._world.accuse(f"an honest report is refused: {error}")
            raise ReportRefused(str(error), len(text)) from error
        if read != status:
            self._world.accuse("a report is another one after it was read")

    async def observe(self, target: RendezvousTarget, observation: Observation) -> None:
        """See RendezvousApi."""
        await self._tell(target, lambda: self._world.take_observation(observation))

    async def lead(self, target: RendezvousTarget, earlier: Earlier) -> None:
        """See RendezvousApi."""
        future, world = self._future(ANSWER_TIMEOUT_S), self._world

        def arrive() -> None:
            if self._is_lost(target, future):
                return
            process = world.rendezvous.find(target)
            if process is not None and process.stands_by:
                world.holds.check_lead(process)
                process.earlier = earlier
                process.stands_by = False
                world.rendezvous._lead(process)
            _set(future, None)

        self._travel(arrive)
        await future

    async def _tell(self, target: RendezvousTarget, take: Any) -> None:
        future, world = self._future(ANSWER_TIMEOUT_S), self._world

        def arrive() -> None:
            if self._is_lost(target, future):
                return
            process = world.rendezvous.find(target)
            if world.rendezvous.leader is not process:
                _set(future, RendezvousUnreachable("503: this rendezvous stands by"))
                return
            take()
            world.after(0.001, lambda: _set(future, None), "")

        self._travel(arrive)
        await future

    def _travel(self, arrive: Any) -> None:
        if not self._process.loop.is_over:
            self._world.after(self._world.rendezvous.random.uniform(0.0005, 0.01), arrive, "")

    def _future(self, limit_s: float) -> asyncio.Future[Any]:
        future = self._process.loop.create_future()
        error = RendezvousUnreachable(f"did not answer within {limit_s:.0f} s")
        self._world.after(limit_s, lambda: _set(future, error), "")
        return future

    def _is_lost(self, target: RendezvousTarget, future: asyncio.Future[Any]) -> bool:
        """Whether nothing arrives there, or is refused at once."""
        process = self._world.rendezvous.find(target)
        if process is None or process.is_over or process.is_isolated or self._process.is_deaf:
            return True
        if not process.is_up:
            _set(future, RendezvousUnreachable("connection refused"))
            return True
        return False


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if future.done() or future.get_loop().is_closed():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
