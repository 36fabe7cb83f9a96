"""Virtual time, the network, the rendezvous and the operator; the pods are in `pod`, what must hold in `invariants`."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.simulation.invariants import Ledger, Violation
from tests.simulation.keeping import Memory
from tests.simulation.pairing import Pairing
from tests.simulation.pod import Pod, Worker
from tests.simulation.schedule import Ambush, FaultPlan, Schedule
from tests.simulation.stalls import Stalls
from tests.simulation.state_invariants import check_state
from tests.simulation.steps import Steps
from tests.simulation.training import FailingPod, Training
from tests.simulation.watches import Watches

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import (
    AgentDisconnected,
    AgentJoined,
    AgentReported,
    Close,
    Event,
    Observed,
    Send,
    Tick,
)
from unbroken_core.protocol.messages import (
    Activity,
    EarlierRun,
    Heartbeat,
    Hello,
    JobStatus,
    Observation,
    Plan,
    PodObservation,
    RendezvousMessage,
    Report,
    Respawn,
)
from unbroken_core.ranks.rules import Rules
from unbroken_core.vocabulary.reasons import Cause, Doing, JobPhase, Role, Rung, WorkerPhase

MAX_EVENTS = 60_000
CALM_AFTER_S = 30.0
STORY_LENGTH = 120
THOROUGH_EVERY = 4
"""One seed in so many is checked thoroughly after each step: that takes as long as the rest."""
OVER = (JobPhase.COMPLETE, JobPhase.FAILED)


@dataclass
class Connection:
    """One WebSocket. Each direction keeps its order."""

    pod: Pod
    epoch: int
    """Which life of the rendezvous it leads to."""
    up_s: float = 0.0
    down_s: float = 0.0
    is_open: bool = True


_Timer = tuple[float, int, Callable[[], None], str]
"""When, a number that makes each one of its kind, what to do, and a text for the story."""


class World:
    """One job with its faults, from a seed."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.settings = schedule.settings
        self.random = random.Random(schedule.seed)
        self.is_thorough = schedule.seed % THOROUGH_EVERY == 0
        self.now_s = 0.0
        self._story: deque[tuple[float, str, object]] = deque(maxlen=STORY_LENGTH)
        self.connections: dict[str, Connection] = {}
        self.pods: dict[str, Pod] = {}
        self.guilty: set[tuple[str, int]] = set()
        self.guilty_pods: set[str] = set()
        self.hung_ever: set[tuple[str, int]] = set()
        """Who has hung at some time: nobody else is named for a hang."""
        self.answers = random.Random(f"answers {schedule.seed}")
        self.entries: dict[int, dict[int, tuple[Pod, Worker]]] = {}
        self.world_sizes: dict[int, int] = {}
        self.num_events = 0
        self.num_faults = 0
        """Those of the schedule that have struck."""
        self.past = (0, -1)
        """Term and iteration of the coordinator before this one."""
        self.trained_s = 0.0
        self._timers: list[_Timer] = []
        self._num_timers = 0
        self._num_ports = 20_000
        self._num_pods = 0
        self.epoch = 0
        self._tick_at_s: float | None = None
        self._num_ambushes: dict[Ambush, int] = {}
        self._created: dict[str, Role] = {}
        self._waiting: dict[str, PodObservation] = {}
        """Pods that the cluster has not started, by uid."""
        self.lacks_pods = False
        """Whether the coordinator was told that fewer pods run than the job needs: only then may it wait for ever."""
        self._queue = random.Random(f"queue {schedule.seed}")
        self.ledger = Ledger(self)
        self.training = Training(self)
        self.failing = FailingPod(self)
        self.memory = Memory(self)
        self.stalls = Stalls(self)
        self.steps = Steps(self)
        self.watches = Watches(self)
        self.pairing = Pairing(self)
        self.terms: dict[int, int] = {}
        """Term of the plan with which an iteration was entered."""
        self.cordoned: set[str] = set()
        """Uids of pods on nodes that are to be left."""
        self.disturbed_s = 0.0
        """When something happened last that was not planned."""
        self.told_of: set[str] = set()
        """Uids of the pods that the operator has told this rendezvous of since it began."""
        self.coordinator: Coordinator | None = Coordinator(self.settings, self.now_s)
        self.last_report: tuple[float, JobStatus] | None = None
        """Of the rendezvous before this one, and when it came."""
        for ordinal in range(self.settings.replicas + self.settings.spares):
            role = Role.ACTIVE if ordinal < self.settings.replicas else Role.SPARE
            self.create_pod(role, self.random.uniform(0.0, 3.0))
        self._last_fault_s = max((fault.at_s for fault in schedule.faults), default=0.0)
        for fault in schedule.faults:
            self.after(fault.at_s, partial(self._strike, fault), fault.text)
        self._observe_soon()

    # ------------------------------------------------------------------------------------------------------------ time

    def after(self, delay_s: float, action: Callable[[], None], text: str) -> None:
        """Do something later; a text goes into the story."""
        self._num_timers += 1
        heapq.heappush(self._timers, (self.now_s + delay_s, self._num_timers, action, text))

    def run(self) -> None:
        """Run until the job is over. Raises Violation."""
        while self._timers:
            self.now_s, _number, action, text = heapq.heappop(self._timers)
            if text:
                self.tell(text)
            action()
            self.num_events += 1
            if self.num_events > MAX_EVENTS:
                raise Violation(f"more than {MAX_EVENTS} events: the job does not come to an end")
            if self.coordinator is not None and self.coordinator.phase in OVER and not self._is_busy():
                break
            if self.now_s > self.schedule.limit_s:
                break
        self.ledger.check_end()
        self.stalls.check_end()
        self.steps.check_end()

    @property
    def is_calm(self) -> bool:
        """Whether all faults of the schedule are long over."""
        return self.now_s > self._last_fault_s and self.now_s > self.disturbed_s + CALM_AFTER_S

    def _is_busy(self) -> bool:
        return any(pod.is_alive and not pod.is_done and pod.connection for pod in self.pods.values())

    def tell(self, text: str, thing: object = "") -> None:
        """Add a line to the story: a text, and a thing that never changes."""
        self._story.append((self.now_s, text, thing))

    @property
    def story(self) -> tuple[str, ...]:
        """What has happened last."""
        # Put into words only here: to name all that passes would cost as much as to let it happen.
        return tuple(f"{at_s:10.3f}  {text}{_short(thing)}" for at_s, text, thing in self._story)

    # --------------------------------------------------------------------------------------------------------- network

    def open_connection(self, pod: Pod) -> str | None:
        """Return the name of a new connection; None when nobody listens."""
        if pod.is_muted or pod.one_way:
            return None
        if self.coordinator is None:
            pod.refused()
            return None
        name = f"{pod.name}#{len(self.connections)}"
        self.connections[name] = Connection(pod, self.epoch)
        return name

    def to_coordinator(self, name: str, message: Hello | Report | Heartbeat, is_lost: bool) -> None:
        """Deliver a message of an agent after a while."""
        connection = self.connections[name]
        if is_lost:
            return
        connection.up_s = max(connection.up_s, self.now_s + self.random.uniform(0.0002, 0.005))
        self.after(connection.up_s - self.now_s, lambda: self._arrive(name, message), "")

    def _arrive(self, name: str, message: Hello | Report | Heartbeat) -> None:
        connection = self.connections[name]
        if not connection.is_open or connection.epoch != self.epoch or self.coordinator is None:
            return
        event: Event = (
            AgentJoined(name, message, self.schedule.can_halt)
            if isinstance(message, Hello)
            else AgentReported(name, message)
        )
        self.ledger.note_ends(connection.pod, message)
        if not isinstance(message, Heartbeat):
            self.memory.note_told(connection.pod, message.memory)
        self.step(event)
        if self.random.random() < 0.05:
            self.ledger.check_repetition(event)

    def to_agent(self, name: str, message: RendezvousMessage) -> None:
        """Deliver a message of the rendezvous after a while."""
        connection = self.connections[name]
        connection.down_s = max(connection.down_s, self.now_s + self.random.uniform(0.0002, 0.005))
        self.after(connection.down_s - self.now_s, lambda: self._deliver(name, message), "")

    def _deliver(self, name: str, message: RendezvousMessage) -> None:
        pod = self.connections[name].pod
        if self.connections[name].is_open and pod.connection == name and pod.is_alive and pod.can_hear:
            pod.hear(message)

    def break_connection(self, name: str) -> None:
        """Break a connection: both sides notice, each in its time; what is under way is lost."""
        connection = self.connections[name]
        if not connection.is_open:
            return
        connection.is_open = False
        pod = connection.pod
        if pod.connection == name:
            pod.disconnected()
            self.after(self.random.uniform(0.05, 0.5), pod.connect, "")
        self.after(self.random.uniform(0.0002, 0.01), lambda: self._notice(name), "")

    def _notice(self, name: str) -> None:
        if self.connections[name].epoch == self.epoch and self.coordinator is not None:
            self.step(AgentDisconnected(name))

    # ------------------------------------------------------------------------------------------------------ rendezvous

    def step(self, event: Event) -> None:
        """Let the coordinator take one event, check what must hold, and carry its actions out."""
        coordinator = self.coordinator
        if coordinator is None:
            return
        if not isinstance(event, Tick):
            self.tell("-> ", event)
        phase, numbers = coordinator.phase, coordinator.past
        newest = coordinator._job.members.world.iteration
        complete = coordinator._job.checkpoints.newest_complete() if self.memory.is_on else None
        self.memory.note_promise(coordinator)
        actions = coordinator.step(event, self.now_s)
        is_quiet = isinstance(event, AgentReported) and isinstance(event.message, Heartbeat) and not actions
        if not is_quiet:
            check_state(coordinator, self.now_s, *numbers, is_thorough=self.is_thorough)
            self.memory.check_table()
        self.stalls.check()
        self.steps.check()
        if coordinator.phase is not phase:
            self._ambush(coordinator.phase)
            status = coordinator.status(self.now_s, str)
            self.tell(f"== {coordinator.phase} {status.reason}: {status.message}")
        for action in actions:
            self.tell("<- ", action)
        self.ledger.check_step(event, actions)
        self.watches.check(actions)
        self.pairing.check(actions)
        plans = [(a.session, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, Plan)]
        self.failing.check_cut(
            {self.connections[session].pod.uid: plan for session, plan in plans if plan.iteration > newest}
        )
        self.memory.check_cut(
            [(self.connections[session].pod, plan) for session, plan in plans if plan.iteration > newest], complete
        )
        for action in actions:
            if isinstance(action, Send):
                self.to_agent(action.session, action.message)
            elif isinstance(action, Close):
                if action.why:
                    raise Violation(f"an honest agent was refused: {action.why}")
                self.break_connection(action.session)
        self._plan_tick()

    def _strike(self, fault: FaultPlan) -> None:
        self.num_faults += 1
        if not fault.is_planned:
            self.disturbed_s = self.now_s
        fault.strike(self)

    def _ambush(self, phase: JobPhase) -> None:
        """Strike at a moment that no clock would find: so soon after the coordinator changed its mind."""
        for ambush in self.schedule.ambushes:
            if ambush.phase is phase:
                self._num_ambushes[ambush] = self._num_ambushes.get(ambush, 0) + 1
                if self._num_ambushes[ambush] == ambush.turn:
                    text = f"{ambush.fault.text} (ambush)"
                    self.after(ambush.fault.at_s, partial(self._strike, ambush.fault), text)

    def _plan_tick(self) -> None:
        if self.coordinator is None:
            return
        deadline_s = self.coordinator.next_deadline_s()
        if deadline_s is None or (self._tick_at_s is not None and self.now_s < self._tick_at_s <= deadline_s):
            return
        self._tick_at_s = deadline_s
        self.after(max(deadline_s - self.now_s, 0.0), lambda: self._tick(deadline_s), "")

    def _tick(self, at_s: float) -> None:
        if self.coordinator is not None and self._tick_at_s == at_s:
            self._tick_at_s = None
            self.step(Tick())

    def crash_coordinator(self, down_s: float) -> None:
        """The rendezvous ends, and comes back without memory."""
        if self.coordinator is None or self.coordinator.phase in (*OVER, JobPhase.ENDING):
            return  # A rendezvous that begins when pods have ended already cannot know how.
        self.disturbed_s = self.now_s
        self.past = self.coordinator.past
        if self.schedule.has_memory:
            self.last_report = (self.now_s, self.coordinator.status(self.now_s, str))
        # What its last step has called protected is noted before the next one, and there is none.
        self.memory.note_promise(self.coordinator)
        self.coordinator = None
        self.epoch += 1
        self._tick_at_s = None
        for name in list(self.connections):
            self.break_connection(name)
        self.ledger.forget()
        self.watches.forget()
        self.after(down_s, self._restart_coordinator, "the rendezvous is back")

    def _restart_coordinator(self) -> None:
        # Its file or the operator has kept the numbers, unless it is one of an own home, or the disk was lost.
        term, iteration = self.past if self.schedule.has_memory else (0, -1)
        self.coordinator = Coordinator(self.settings, self.now_s, term + 1, iteration)
        self.lacks_pods = False
        self.told_of.clear()
        self._plan_tick()
        self._observe_soon()

    # -------------------------------------------------------------------------------------------------------- operator

    def create_pod(self, role: Role, delay_s: float) -> None:
        """Make a pod, as the operator does. `delay_s` counts from when the cluster has a node for it."""
        ordinal = self._num_pods
        self._num_pods += 1
        rack = f"rack-{ordinal % self.schedule.num_racks}"
        domains = tuple(f"{rack}" for _layer in self.settings.layers)

        def appear() -> None:
            self._waiting.pop(f"uid-{ordinal}", None)
            pod = Pod(self, f"pod-{ordinal}", f"uid-{ordinal}", f"node-{ordinal}", domains)
            self.pods[pod.uid] = pod
            self.watches.begin(pod)
            self.pairing.begin(pod)
            self._created[pod.uid] = role
            pod.connect()
            self._observe_soon()

        if self.schedule.queue_s:
            self._waiting[f"uid-{ordinal}"] = PodObservation(f"pod-{ordinal}", "", (), role, is_waiting=True)
            delay_s += self._queue.uniform(0.0, self.schedule.queue_s)
            self._observe_soon()
        self.after(delay_s, appear, f"pod-{ordinal} starts as {role}")

    def pod_died(self, pod: Pod) -> None:
        """Replace it some time later."""
        self.guilty_pods.add(pod.uid)
        self.disturbed_s = self.now_s
        self.memory.pod_died(pod)
        self.tell(f"{pod.name} is gone")
        self._observe_soon()
        self.after(self.random.uniform(0.5, 20.0), lambda: self.create_pod(Role.SPARE, 1.0), "")

    def cordon(self, pod: Pod, lasts_s: float, comes_back: bool) -> None:
        """Let a pod give its ranks away; then its node is free again, or the operator deletes it."""
        self.cordoned.add(pod.uid)
        self.guilty_pods.add(pod.uid)
        self.tell(f"{pod.name} is to be left")
        self._observe_soon()

        def end() -> None:
            self.cordoned.discard(pod.uid)
            if not comes_back:
                pod.die(is_silent=False)
            self._observe_soon()

        self.after(lasts_s, end, f"{pod.name} is {'free again' if comes_back else 'deleted'}")

    def _observe_soon(self) -> None:
        self.after(self.random.uniform(0.1, 2.0), self._observe, "")

    def _observe(self) -> None:
        pods = {
            uid: PodObservation(
                pod.name,
                pod.node,
                pod.domains,
                self._created[uid],
                Cause.POD_LEAVING if pod.is_leaving or uid in self.cordoned else None,
            )
            for uid, pod in self.pods.items()
            if pod.is_alive
        }
        if self.coordinator is not None:
            num_running = sum(pod.gone is None for pod in pods.values())
            self.lacks_pods = num_running < Rules.of(self.settings).least_pods
            self.told_of.update(pods)
            earlier, counted = self._earlier(), self._counted()
            observation = Observation({**pods, **self._waiting}, self.schedule.is_accounted, (), earlier, counted)
            self.step(Observed(observation))
            self._check_time(observation.earlier)

    def _earlier(self) -> EarlierRun | None:
        if self.last_report is None or self.last_report[1].ran_for_s is None:
            return None
        at_s, report = self.last_report
        return EarlierRun(self.now_s - at_s, report.gained_s, self.last_report[1].ran_for_s or 0.0, report.time)

    def _counted(self) -> tuple[int, int] | None:
        """Return the newest recovery that the operator has heard of; it always heard the last report."""
        if not self.schedule.has_memory:
            return None
        ended = [item.number for item in self.last_report[1].recoveries if item.ended_at] if self.last_report else []
        return (self.last_report[1].term, max(ended)) if self.last_report and ended else (0, 0)

    def _check_time(self, earlier: EarlierRun | None) -> None:
        """What the rendezvous before had counted is neither lost nor counted twice."""
        status = None if self.coordinator is None else self.coordinator.status(self.now_s, str)
        if earlier is None or status is None or status.ran_for_s is None:
            return
        if status.phase in OVER or status.phase is JobPhase.ENDING:
            return  # The clock has stopped when all ranks had returned.
        wall_s = earlier.ran_for_s + earlier.ago_s
        if status.ran_for_s < wall_s - 1e-9:
            raise Violation(f"{earlier} was {earlier.ago_s} s ago, and it ran for {status.ran_for_s} s")
        # Pods may have trained for longer than the rendezvous before could see.
        if status.ran_for_s < wall_s + 1e-6 and status.gained_s > earlier.gained_s + earlier.ago_s + 1e-6:
            raise Violation(f"{earlier}, and now {status.gained_s} s of progress")

    # ---------------------------------------------------------------------------------------------------- the training

    def next_port(self) -> int:
        """Return a port that nobody had."""
        self._num_ports += 1
        return self._num_ports

    def entered(self, pod: Pod, worker: Worker, plan: Plan) -> None:
        """A worker entered the training function."""
        iteration, rank = plan.iteration, worker.rank
        if rank is None:
            raise Violation("a worker entered without a rank")
        entries = self.entries.setdefault(iteration, {})
        entries[rank] = (pod, worker)
        self.watches.entered(pod, worker)
        self.failing.entered(pod, worker)
        self.world_sizes[iteration] = plan.world_size
        if len(entries) == plan.world_size:
            self.ledger.check_one_world(iteration)
            self.training.began_s[iteration] = self.now_s
            self.steps.begin(iteration)
            for other, member in list(entries.values()):
                if member.is_hung:
                    self.hung(other, iteration)
            self.terms[iteration] = plan.term
            self.memory.entered(iteration, plan.term)
            left_s = max(self.schedule.work_s - self.trained_s, 1.0)
            began_s = self.now_s
            self.after(left_s, lambda: self._complete(iteration, began_s), f"iteration {iteration} has trained")

    def is_intact(self, iteration: int) -> bool:
        """Whether all workers of the iteration are in it and none hangs."""
        inside = (WorkerPhase.RUNNING, WorkerPhase.COMPLETED)
        entries = self.entries.get(iteration, {})
        return len(entries) == self.world_sizes.get(iteration) and all(
            worker.iteration == iteration and worker.phase in inside and not worker.is_hung
            for _pod, worker in entries.values()
        )

    def trains(self, iteration: int) -> bool:
        """Whether a step of this iteration can still be made."""
        phases = {worker.phase for _pod, worker in self.entries.get(iteration, {}).values()}
        return WorkerPhase.RUNNING in phases and self.is_intact(iteration)

    def _complete(self, iteration: int, began_s: float) -> None:
        is_same = self.training.began_s.get(iteration) == began_s  # A rendezvous without memory uses a number again.
        if not is_same or not self.is_intact(iteration):
            self.trained_s = min(self.trained_s + self.schedule.checkpoint_s, self.schedule.work_s)
            return
        self.trained_s = self.schedule.work_s
        self.steps.end(iteration)
        for pod, worker in self.entries[iteration].values():
            incarnation = worker.incarnation
            delay_s = self.random.uniform(0.0, self.schedule.completion_spread_s)
            self.after(delay_s, partial(self._complete_one, pod, worker, incarnation, iteration), "")

    @staticmethod
    def _complete_one(pod: Pod, worker: Worker, incarnation: int, iteration: int) -> None:
        is_same = worker.incarnation == incarnation and worker.iteration == iteration
        if is_same and worker.phase is WorkerPhase.RUNNING and not worker.is_hung and pod.is_alive:
            if worker.is_held:
                again = partial(World._complete_one, pod, worker, incarnation, iteration)
                pod.world.after(0.5, again, "")
            else:
                pod.complete(worker)

    def _peers(self, pod: Pod, iteration: int) -> list[tuple[Pod, Worker]]:
        """Return who trains in this iteration with the pod; a new rendezvous may use the number a second time."""
        peers = list(self.entries.get(iteration, {}).values())
        return peers if any(peer is pod for peer, _worker in peers) else []

    def left(self, pod: Pod, iteration: int) -> None:
        """Without one of its workers an iteration makes no step more."""
        if self._peers(pod, iteration):
            self.steps.end(iteration)

    def broke(self, culprit: Pod, iteration: int) -> None:
        """A worker left the iteration: some peers notice by an exception, the others wait in a collective."""
        self.left(culprit, iteration)
        for pod, worker in self._peers(culprit, iteration):
            if worker.iteration != iteration or worker.phase is not WorkerPhase.RUNNING or worker.is_hung:
                continue
            incarnation = worker.incarnation
            if self.random.random() < self.schedule.consequences:
                delay_s = self.random.uniform(0.0055, 0.03)
                self.after(delay_s, partial(self._consequence, pod, worker, incarnation, iteration), "")
            else:
                self._block(pod, worker)

    def hung(self, culprit: Pod, iteration: int) -> None:
        """A worker hangs: the others wait for it."""
        self.left(culprit, iteration)
        for pod, worker in self._peers(culprit, iteration):
            if worker.iteration == iteration and worker.phase is WorkerPhase.RUNNING and not worker.is_hung:
                self._block(pod, worker)

    def _block(self, pod: Pod, worker: Worker) -> None:
        """Its stamps look stale, too, and perhaps earlier than those of the one that hangs."""
        incarnation, iteration = worker.incarnation, worker.iteration
        age_s = self.settings.timeouts.soft_s + self.random.uniform(-4.0, 4.0)
        worker.blocked_at_s = self.now_s if worker.blocked_at_s is None else worker.blocked_at_s

        def suspect() -> None:
            if worker.iteration == iteration:
                pod.suspect(worker, incarnation, age_s)

        self.after(age_s, suspect, "")

    def activity_of(self, worker: Worker) -> Activity | None:
        """Return what an agent sees of a worker that it was told to end; None: nothing."""
        pick, soft_s = self.answers.random(), self.settings.timeouts.soft_s
        if pick < 0.05:
            return None
        if worker.is_hung:
            idle_s = self.now_s - worker.hung_at_s
            doing = self.answers.choice((Doing.OWN_CODE, Doing.FROZEN, Doing.DATA_LOADER, Doing.IO, Doing.UNKNOWN))
        elif worker.blocked_at_s is not None:
            idle_s = self.now_s - worker.blocked_at_s
            doing = self.answers.choice((Doing.COLLECTIVE, Doing.COLLECTIVE, Doing.WAITING, Doing.UNKNOWN))
        else:
            # It trains: wherever it is, it has not been there for long.
            idle_s = self.answers.uniform(0.0, soft_s / 4)
            doing = self.answers.choice((Doing.COLLECTIVE, Doing.WAITING, Doing.OWN_CODE, Doing.UNKNOWN))
            return Activity(worker.iteration, doing, "somewhere", idle_s, idle_s)
        has_pings = self.schedule.tells_steps != "none"
        return Activity(worker.iteration, doing, "somewhere", idle_s, idle_s if has_pings else -1.0)

    @staticmethod
    def _consequence(pod: Pod, worker: Worker, incarnation: int, iteration: int) -> None:
        if worker.incarnation == incarnation and worker.iteration == iteration:
            pod.raise_exception(worker, "connection reset by peer")

    # ------------------------------------------------------------------------------------------------------ what holds

    def note_guilt(self, pod: Pod, worker: Worker, what: str) -> None:
        """A fault happens to this worker: it may be blamed, and its process may be ended."""
        self.guilty.add((pod.uid, worker.local_rank))
        self.disturbed_s = self.now_s
        self.tell(f"!! {pod.name}/{worker.local_rank} {what}")

    def check_entry(self, pod: Pod, worker: Worker, plan: Plan) -> None:
        """A worker is about to enter."""
        self.ledger.check_entry(pod, worker, plan)

    def check_respawn(self, pod: Pod, worker: Worker, order: Respawn) -> None:
        """A worker's process is about to be replaced."""
        is_doomed = (pod.uid, worker.local_rank, worker.incarnation) in self.ledger.doomed
        is_job_rung = self.ledger.rung is Rung.JOB or is_doomed
        is_gone = worker.phase is WorkerPhase.GONE
        if not is_gone and not is_job_rung and (pod.uid, worker.local_rank) not in self.guilty:
            raise Violation(f"{pod.name}/{worker.local_rank} is healthy ({worker.phase}), but {order} ends it")


def _short(thing: object) -> str:
    text = repr(thing) if thing else ""
    return text if len(text) <= 400 else f"{text[:397]}..."
