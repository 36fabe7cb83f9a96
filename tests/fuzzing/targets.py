"""Who listens: each target takes one message a step, as its process would, and keeps what must hold.

A message is taken, or refused with the one error that its reader catches (WireError). Anything else is a defect, and
so is a message of ours that its own receiver would refuse.
"""

import time
import typing
from abc import ABC, abstractmethod
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

from tests.fuzzing.speech import Speaker, spoilt_bytes
from tests.simulation.state_invariants import check_state

from unbroken.agent.adapters.memory_file import _format, _parse
from unbroken.agent.decisions.events import (
    AgentMemory,
    Connected,
    Disconnected,
    Event,
    Exit,
    LauncherAttached,
    LauncherLost,
    LauncherReported,
    PairsReported,
    PreflightReported,
    RendezvousSent,
    SendToLauncher,
    SendToRendezvous,
    SendToWorker,
    Ticked,
    WatchLost,
    WatchReported,
    WorkerAttached,
    WorkerDied,
    WorkerLost,
    WorkerReported,
)
from unbroken.agent.decisions.member import PodMember
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import (
    AgentDisconnected,
    AgentJoined,
    AgentReported,
    Close,
    Observed,
    Send,
    Tick,
)
from unbroken_core.coordinator.events import Event as CoordinatorEvent
from unbroken_core.pod.pod_messages import Attach, Processes, ToLauncher, ToWorker, WorkerReport
from unbroken_core.pod.stacks import parse_stack
from unbroken_core.pod.stamps import WorkerStamps
from unbroken_core.protocol import wire
from unbroken_core.protocol.bounds import MAX_NUMBER
from unbroken_core.protocol.messages import (
    PROTOCOL,
    AgentMessage,
    Heartbeat,
    Hello,
    Interrupt,
    Observation,
    PairState,
    Plan,
    RendezvousMessage,
    Report,
    WorkerState,
)
from unbroken_core.protocol.settings import HealthMode, JobSettings, RungBudget, Timeouts
from unbroken_core.torchrun_rounds.messages import NodeReport, Rejected, Standing
from unbroken_core.torchrun_rounds.rounds import RunRounds, SendToNode
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.findings import Health
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import JobPhase, RankReason, Role, Rung, WorkerPhase
from unbroken_operator.decisions.limits.report import read_report, report_limits

_PLAN_REASONS = tuple(reason.value for reason in RankReason)
_PROCESS_RUNGS = (RungBudget(Rung.PROCESS), RungBudget(Rung.POD), RungBudget(Rung.WORLD))
_RESET_EVERY = 3000
_OVER = (JobPhase.COMPLETE, JobPhase.FAILED)
_PODS = ("p0", "p1", "p2", "p3")


class Target(ABC):
    """One listener. It depends on its source alone, so that whatever happens can be seen again."""

    name: ClassVar[str]

    def __init__(self, source: Random) -> None:
        self.source = source
        self.num_refused = 0
        self.num_steps_since = 0
        self.took_s = 0.0
        """CPU time of this thread in the listener for the last message."""
        self.heard = ""
        """The last message."""
        self.began: Any = source.getstate()
        """The source when `num_steps_since` began to count."""
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Begin anew, as a new process would."""

    @abstractmethod
    def listen(self) -> None:
        """Take one message."""

    def step(self) -> None:
        """Take one message; now and then by a new process."""
        if self.num_steps_since == _RESET_EVERY:
            self.began, self.num_steps_since = self.source.getstate(), 0
            self.reset()
        self.num_steps_since += 1
        self.took_s = 0.0
        try:
            self.listen()
        except WireError as error:
            str(error).encode()
            self.num_refused += 1

    def decode(self, text: str | bytes, expected: Any) -> Any:
        """Read a message, on the clock."""
        self.heard = str(text)
        started_s = time.thread_time()
        try:
            return wire.decode(text, expected)
        finally:
            self.took_s += time.thread_time() - started_s


def check_own(message: object, expected: Any) -> None:
    """Raise AssertionError where its receiver would refuse a message of ours: a WireError would pass for a refusal."""
    try:
        wire.decode(wire.encode(message), expected)
    except WireError as error:
        raise AssertionError(f"its receiver refuses {message!r:.400}: {error}") from error


class CoordinatorTarget(Target):
    """A job's coordinator, its agents, and its operator."""

    name = "coordinator"

    def reset(self) -> None:
        """Begin another job."""
        source = self.source
        self.settings = JobSettings(
            "digits",
            replicas=source.choice((1, 2, 3)),
            spares=source.choice((0, 1)),
            ranks_per_pod=source.choice((1, 2)),
            min_replicas=1,
            rungs=source.choice((JobSettings("d").rungs, _PROCESS_RUNGS)),
            max_faults_per_rank=source.choice((None, 3)),
            no_progress_limit=None,
            timeouts=Timeouts(startup_s=source.choice((60.0, 6000.0))),
            health=source.choice((HealthMode.OBSERVE, HealthMode.ACT)),
            layers=source.choice(((), (Layer("rack", "l/rack"),))),
        )
        preflight, has_pairs = source.choice(
            ((HealthMode.OFF, False), (HealthMode.ACT, False), (HealthMode.ACT, True), (HealthMode.OBSERVE, True))
        )
        self.settings = replace(self.settings, preflight=preflight, preflight_s=20.0, preflight_pairs=has_pairs)
        self.now_s = 0.0
        self.coordinator = Coordinator(self.settings, 0.0)
        self.pods: dict[str, str] = {}
        """Pod by session."""
        self.plans: dict[str, Plan] = {}
        """The newest plan of each pod."""
        self.is_interrupted: dict[str, bool] = {}
        self.num_sessions = 0
        self.seq = 0

    def listen(self) -> None:
        """Take a message of an agent or the operator, or let time pass."""
        if self.coordinator.phase in _OVER and self.source.random() < 0.05:
            self.reset()
        what = self.source.random()
        if what < 0.15 or not self.pods:
            self._join()
        elif what < 0.55:
            self._report()
        elif what < 0.85:
            self._obey()
        elif what < 0.9:
            session = self.source.choice(list(self.pods))
            self._lose(session)
        elif what < 0.95:
            self._observe()
        else:
            self._pass(self.source.choice((0.1, 1.0, 6.0, 40.0, 130.0)))
            self._show()

    def _speaker(self, pod: str) -> Speaker:
        term, iteration = self.coordinator.past
        usual = {
            "protocol": (PROTOCOL,),
            "job": ("digits",),
            "pod": (pod,),
            "pod_uid": (f"uid-{pod}",),
            "ranks_per_pod": (self.settings.ranks_per_pod,),
            "seq": (self.seq,),
            "term": (term, term, term - 1, term + 1),
            "iteration": (iteration, iteration, iteration - 1, iteration + 1),
            "local_rank": tuple(range(self.settings.ranks_per_pod)),
            "incarnation": (0, 0, 0, 1),
            "reason": _PLAN_REASONS,
        }
        return Speaker(self.source, usual)

    def _join(self) -> None:
        pod = self.source.choice(_PODS)
        is_honest = self.source.random() < 0.5
        text = wire.encode(self._honest_hello(pod)) if is_honest else self._speaker(pod).say(Hello)
        hello = self.decode(text, Hello)
        self.num_sessions += 1
        session = f"s{self.num_sessions}"
        self.pods[session] = pod
        self.act(AgentJoined(session, hello, self.source.random() < 0.9))

    def _honest_hello(self, pod: str) -> Hello:
        plan, phase = self.plans.get(pod), WorkerPhase.READY
        iteration = -1 if plan is None else plan.iteration
        if plan is not None and not self.is_interrupted.get(pod):
            phase = WorkerPhase.RUNNING
        term = 0 if plan is None else plan.term
        size = self.settings.ranks_per_pod
        states = self._states(phase, iteration)
        return Hello(PROTOCOL, "digits", pod, f"uid-{pod}", "s", f"n-{pod}", size, (), term, plan, states)

    def _states(self, phase: WorkerPhase, iteration: int) -> tuple[WorkerState, ...]:
        host, port = ("10.0.0.1", 5000) if phase is WorkerPhase.READY else ("", 0)
        numbers = range(self.settings.ranks_per_pod)
        return tuple(WorkerState(number, 0, phase, iteration, host, port) for number in numbers)

    def _report(self) -> None:
        session = self.source.choice(list(self.pods))
        self.seq += 1
        text = self._speaker(self.pods[session]).say(Report, Report, Heartbeat)
        self._tell(session, text)

    def _obey(self) -> None:
        """Let one pod do what it was told."""
        session, pod = self.source.choice(list(self.pods.items()))
        plan = self.plans.get(pod)
        phase, iteration = WorkerPhase.READY, -1 if plan is None else plan.iteration
        if plan is not None and not self.is_interrupted.get(pod):
            phase = WorkerPhase.RUNNING
            if self.source.random() < 0.02:
                phase = WorkerPhase.COMPLETED
        self.seq += 1
        self._tell(session, wire.encode(Report(self.seq, self._states(phase, iteration))))

    def _tell(self, session: str, text: str) -> None:
        try:
            message = self.decode(text, Report | Heartbeat)
        except WireError:
            self._lose(session)
            raise
        self.act(AgentReported(session, message))

    def _lose(self, session: str) -> None:
        del self.pods[session]
        self.act(AgentDisconnected(session))

    def _observe(self) -> None:
        pods: dict[str, Any] = {
            f"uid-{pod}": {"pod": pod, "node": f"n-{pod}", "domains": []} for pod in ("p0", "p1", "p2")
        }
        text = self._speaker("p0").say(Observation)
        if self.source.random() < 0.7:
            observation = Observation({}, self.source.random() < 0.5)
            text = self._speaker("p0").repeat(observation, {"pods": pods})
        self.act(Observed(self.decode(text, Observation)))

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        self.act(Tick())

    def _show(self) -> None:
        """Let the operator read the report. What it refused would be a job that went silent for one pod's words."""
        settings = self.settings
        size = {"replicas": settings.replicas, "spares": {"count": settings.spares}}
        limits = report_limits({**size, "ranksPerPod": settings.ranks_per_pod}, len(_PODS))
        status = self.coordinator.status(self.now_s, lambda _seconds: "2026-01-01T00:00:00.5Z")
        try:
            read_report(wire.encode(status).encode(), limits)
        except WireError as error:
            raise AssertionError(f"the operator refuses the report: {error}") from error

    def act(self, event: CoordinatorEvent) -> None:
        """Let the coordinator take an event, and check what it does."""
        self.now_s += 0.001
        deadline_s = self.coordinator.next_deadline_s()
        for one in (Tick(), event) if deadline_s is not None and deadline_s <= self.now_s else (event,):
            before = self.coordinator.past
            started_s = time.thread_time()
            actions = self.coordinator.step(one, self.now_s)
            self.took_s += time.thread_time() - started_s
            check_state(self.coordinator, self.now_s, *before)
            for action in actions:
                self._note(action)

    def _note(self, action: Send | Close) -> None:
        pod = self.pods.get(action.session)
        if isinstance(action, Close):
            if self.pods.pop(action.session, None) is not None:
                self.act(AgentDisconnected(action.session))
            return
        check_own(action.message, RendezvousMessage)
        if pod is not None and isinstance(action.message, Plan):
            self.plans[pod], self.is_interrupted[pod] = action.message, False
        elif pod is not None and isinstance(action.message, Interrupt):
            self.is_interrupted[pod] = True


class AgentTarget(Target):
    """A pod's agent: its launcher, its workers, its page of stamps, and the rendezvous."""

    name = "agent"

    def reset(self) -> None:
        """Begin another agent."""
        source = self.source
        rungs = source.choice((JobSettings("d").rungs, _PROCESS_RUNGS))
        settings = JobSettings("digits", replicas=2, ranks_per_pod=2, rungs=rungs)
        identity = Hello(PROTOCOL, "digits", "p0", "uid-p0", "s", "n0", 2)
        self.now_s = 1000.0
        self.member = PodMember(settings, identity, "10.0.0.1", AgentMemory(), self.now_s)

    def listen(self) -> None:
        """Take one message, or let time pass."""
        self.now_s += self.source.choice((0.001, 0.01, 0.1, 1.0, 20.0))
        self.heard = ""
        event = self._event()
        self.heard = self.heard or repr(event)
        started_s = time.thread_time()
        actions = self.member.step(event, self.now_s)
        self.took_s += time.thread_time() - started_s
        if any(isinstance(action, Exit) for action in actions):
            self.reset()
        elif self.member.settle(self.now_s):
            raise AssertionError(f"settling twice changed something after {event!r}")
        for action in actions:
            if isinstance(action, SendToRendezvous):
                check_own(action.message, AgentMessage)
            elif isinstance(action, SendToWorker):
                check_own(action.message, ToWorker)
            elif isinstance(action, SendToLauncher):
                check_own(action.message, ToLauncher)

    def _event(self) -> Event:
        source, plan = self.source, self.member.instructions.plan
        iteration, term = -1 if plan is None else plan.iteration, self.member.instructions.term
        numbers = tuple(place.incarnation.number for place in self.member.places)
        usual = {
            "protocol": (PROTOCOL,),
            "role": ("worker", "worker", "launcher"),
            "term": (term, term, term + 1),
            "iteration": (iteration, iteration, iteration + 1),
            "local_rank": (0, 1),
            "incarnation": (*numbers, *numbers, numbers[0] + 1),
            "world_size": (2, 4),
            "pid": (50, 51),
            "exit_code": (None, None, None, 0, 1, -9),
        }
        speaker = Speaker(source, usual)
        rank, what = source.randrange(2), source.random()
        if what < 0.3:
            report = self.decode(speaker.say(WorkerReport), WorkerReport)
            impossible = self.member.check_report(report)
            if impossible is not None:
                raise WireError(impossible)
            return WorkerReported(rank, numbers[rank], report)
        if what < 0.45:
            kind = source.random()
            if kind < 0.1:
                message: Event = PairsReported(self.decode(speaker.say(PairState), PairState))
            elif kind < 0.3:
                found = self.decode(speaker.say(Health), Health)
                message = source.choice((WatchReported, WatchReported, PreflightReported))(found)
            else:
                message = LauncherReported(self.decode(speaker.say(Processes), Processes))
            return message
        if what < 0.7:
            usual = {**usual, "role": tuple(role.value for role in Role), "over": (-1, iteration - 1)}
            speaker = Speaker(source, usual)
            return RendezvousSent(self.decode(speaker.say(*typing.get_args(RendezvousMessage)), RendezvousMessage))
        if what < 0.8:
            return Ticked((self._slot(0, numbers[0], iteration), self._slot(1, numbers[1], iteration)))
        if what < 0.88:
            attach: Attach = self.decode(speaker.say(Attach), Attach)
            return WorkerAttached(replace(attach, local_rank=rank))
        others = (LauncherAttached(), LauncherLost(), WatchLost(), Connected(), Connected(), Disconnected())
        return source.choice((*others, WorkerLost(rank, numbers[rank]), WorkerDied(rank, numbers[rank])))

    def _slot(self, rank: int, incarnation: int, iteration: int) -> WorkerStamps:
        source, now_ns = self.source, int(self.now_s * 1e9)

        def stamp() -> int:
            return source.choice((0, 1, now_ns, now_ns - 10**10, -(1 << 63), (1 << 63) - 1))

        step = source.choice((-1, 0, 7, MAX_NUMBER))
        return WorkerStamps(50 + rank, iteration, stamp(), stamp(), stamp(), step, source.randrange(8), incarnation)


class RoundsTarget(Target):
    """The rendezvous for torchrun."""

    name = "rounds"

    def reset(self) -> None:
        """Begin another run."""
        self.rounds = RunRounds()
        self.now_s = 0.0

    def listen(self) -> None:
        """Take a node's report, or lose its connection."""
        source = self.source
        self.now_s += source.choice((0.001, 0.1, 5.0))
        node = source.randrange(4)
        newest = self.rounds.newest[0]
        rounds = (-1, newest, newest + 1)
        usual = {
            "protocol": (1,),
            "uid": (f"uid-{node}",),
            "name": (f"node-{node}",),
            "address": ("10.0.0.1",),
            "min_nodes": (2,),
            "max_nodes": (3,),
            **dict.fromkeys(("last_call_s", "heartbeat_s", "reconnect_s", "leave_s", "start_s"), (1.0, 5.0)),
            **dict.fromkeys(("ready_round", "round", "known_round", "seen_round"), rounds),
            "rank": (-1, 0, 1),
            "attempt": (0, 1, 2),
            "known_size": (0, 2),
            "store_port": (0, 5000),
        }
        session = f"{node}#{source.randrange(2)}"
        started_s = time.thread_time()
        try:
            if source.random() < 0.1:
                self.rounds.lose(session, self.now_s)
            else:
                self.heard = text = Speaker(source, usual).say(NodeReport)
                started_s = time.thread_time()
                report = wire.decode(text, NodeReport)
                self.rounds.receive(session, report, ("10.0.0.9", "10.0.0.1"), self.now_s)
        finally:
            actions = self.rounds.settle(self.now_s)
            self.took_s += time.thread_time() - started_s
        for action in actions:
            if isinstance(action, SendToNode):
                check_own(action.message, Standing | Rejected)
        if self.rounds.is_over(self.now_s):
            self.reset()


class FileTarget(Target):
    """What lies in the volumes of a pod: the agent's memory, and stacks."""

    name = "files"

    def reset(self) -> None:
        """Write another memory."""
        plan = Plan(2, 3, Role.ACTIVE, 4, "10.0.0.1", 600, ())
        self.memory = _format(AgentMemory(2, 1, plan, (0, 1)), self.source.randrange(1000))
        frames = '  File "/a b.py", line {} in f\n'
        self.stack = "Current thread (most recent call first):\n" + "".join(frames.format(n) for n in range(40))

    def listen(self) -> None:
        """Read both, spoilt."""
        memory, stack = spoilt_bytes(self.source, self.memory), spoilt_bytes(self.source, self.stack.encode())
        self.heard = f"{memory!r} {stack!r}"
        started_s = time.thread_time()
        _parse(memory)
        frames = parse_stack(stack.decode(errors="replace"))
        self.took_s += time.thread_time() - started_s
        assert len(frames) <= 24


TARGETS: dict[str, type[Target]] = {
    "coordinator": CoordinatorTarget,
    "agent": AgentTarget,
    "rounds": RoundsTarget,
    "files": FileTarget,
}
