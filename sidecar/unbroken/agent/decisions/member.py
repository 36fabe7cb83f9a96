"""One pod as its agent sees it, and which messages to send to whom. Pure: `step` is all there is.

    launcher ──Processes──>  ┌───────────┐  ──Hello, Report, Heartbeat──>  rendezvous
             <──Spawn, End── │ PodMember │  <──Plan, Interrupt, Respawn──
    worker ──WorkerReport──> │           │
           <──Enter, Leave── └───────────┘  <──stamps of the page, time

Level, not edge: `take` only notes facts; `settle` compares the state with the wanted one and returns what is missing.
So nothing depends on having seen a message. The life of a place (in brackets: jobs that restart processes):

    STARTING ──attached [port held]──> READY ──Enter [Spawn]──> RUNNING ──returned [exit 0]──> COMPLETED
       ^                                 ^                         │ fault, or iteration over: Leave [End]
       │ Respawn                         └──────── READY ──── STOPPING ──not READY in hard - soft──> End
      GONE <──────────────────────────────────────────────── process ended
"""

from dataclasses import replace

from unbroken.agent.decisions.activity import note_activities, note_answer
from unbroken.agent.decisions.ages import IterationAges
from unbroken.agent.decisions.events import (
    Action,
    AgentMemory,
    CloseConnection,
    Connected,
    ConnectionRefused,
    Disconnected,
    Event,
    Exit,
    KeeperAsked,
    KeeperSeen,
    KeeperStarted,
    LauncherAttached,
    LauncherLost,
    LauncherReported,
    LinesReported,
    PairsReported,
    PreflightReported,
    Remember,
    RendezvousSent,
    SendToLauncher,
    SendToRendezvous,
    Terminated,
    Ticked,
    WatchLost,
    WatchReported,
    WorkerAttached,
    WorkerDied,
    WorkerLost,
    WorkerReported,
)
from unbroken.agent.decisions.fence import Contact, explain, longest_absence_s
from unbroken.agent.decisions.hang_detection import (
    attach_patience_s,
    checkpoint_after_s,
    checkpoint_s,
    note_absent,
    note_hangs,
    step_ago_s,
)
from unbroken.agent.decisions.instructions import Instructions
from unbroken.agent.decisions.keeping import Keeping, restart_of
from unbroken.agent.decisions.log_lines import LogLines
from unbroken.agent.decisions.orders import Orders
from unbroken.agent.decisions.own_fault import confirm_faults, interrupt_early
from unbroken.agent.decisions.pairs import PairTests
from unbroken.agent.decisions.place import LocalPlace
from unbroken.agent.decisions.reporting import Reporter
from unbroken.agent.decisions.watching import Watching
from unbroken.agent.decisions.worker_state import worker_states
from unbroken_core.pod.pod_messages import Follow, Processes, WorkerReport
from unbroken_core.protocol.bounds import MAX_CLAIMED
from unbroken_core.protocol.messages import (
    PROTOCOL,
    Buddies,
    Certificate,
    Consult,
    Finish,
    Halt,
    Hello,
    Interrupt,
    PairOrder,
    Plan,
    Refused,
    RendezvousMessage,
    Respawn,
    Welcome,
    WorkerState,
)
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.errors import assert_never
from unbroken_core.vocabulary.findings import Health, bounded
from unbroken_core.vocabulary.reasons import WorkerPhase

_ADOPTION_SHARE = 0.6
"""Share of timeouts.reconnect for which a restarted agent waits for its pod's processes before it joins. Processes that
are missing by then count as lost, so it waits long; the rest of the time is for its own start."""
_REFUSED_RETRY_S = 5.0
_MOST_AWAY_S = 86_400.0
"""So long a worker may say that its agent was away: after a day nobody waits for a pod."""
_EXIT_MARGIN_S = 10.0
"""Beyond every grace: the agent ends after this even if its launcher does not."""


class PodMember:
    """The pure logic of one pod; not thread-safe. All times are monotonic seconds of one clock."""

    def __init__(self, settings: JobSettings, identity: Hello, host: str, memory: AgentMemory, now_s: float) -> None:
        """`identity` is a Hello without state; `host` is the address at which this pod's ports are reached."""
        self.settings = settings
        self.identity = identity
        self.host = host
        self.places = [LocalPlace(rank) for rank in range(settings.ranks_per_pod)]
        self.instructions = Instructions(memory.term, memory.interrupted, memory.plan)
        self.orders = Orders(settings, self.places, self.instructions)
        self.reporter = Reporter(
            now_s + (0.0 if memory.plan is None else _ADOPTION_SHARE * settings.timeouts.reconnect_s),
            settings.replicas + settings.spares,
        )
        self._memory = memory
        self._planned = memory.planned
        self._has_launcher = False
        self._is_follow_due = False
        """Whether the launcher has yet to be told what to look for in workers' lines."""
        self._is_launcher_lost = False
        self._is_launcher_leaving = False
        self._is_terminated = False
        self._exit_by_s: float | None = None
        self._hang_up: CloseConnection | None = None
        self._contact = Contact(now_s)
        self._ages = IterationAges()
        self._keeping = Keeping()
        self._watching = Watching()
        self._pairs = PairTests(host)
        self.log_lines = LogLines(settings.log_rules, -1 if memory.plan is None else memory.plan.iteration)

    # ------------------------------------------------------------------------------------------------------- queries

    @property
    def is_accepted(self) -> bool:
        """Whether the connection to the rendezvous is up, and the rendezvous has accepted this agent."""
        return self.reporter.is_accepted

    @property
    def is_leaving(self) -> bool:
        """Whether the pod's ranks should move elsewhere."""
        return self._is_terminated or self._is_launcher_leaving or self._is_launcher_lost

    @property
    def is_whole(self) -> bool:
        """Whether the launcher has reported its processes and none of them is still starting."""
        return self._has_launcher and all(state.phase is not WorkerPhase.STARTING for state in self.workers)

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """All workers of the pod as they are now, in local order."""
        return worker_states(self.places, self.instructions, self.settings.is_in_process, self.host)

    @property
    def asked_for_stacks(self) -> tuple[int, ...]:
        """Local ranks of the workers that have come close to the soft timeout in this iteration."""
        iteration = -1 if self.instructions.plan is None else self.instructions.plan.iteration
        return tuple(place.local_rank for place in self.places if place.incarnation.stack_asked == iteration >= 0)

    @property
    def next_deadline_s(self) -> float | None:
        """When `step` must be called with Ticked at the latest; None when nothing is due."""
        incarnations = [place.incarnation for place in self.places]
        due = [each.must_be_ready_by_s for each in incarnations if each.must_be_ready_by_s is not None]
        if self.settings.is_in_process:
            limit_s = attach_patience_s(self.settings.timeouts)
            due += [
                each.alive_since_s + limit_s
                for each in incarnations
                if each.alive_since_s is not None and each.found is None
            ]
        due += self.reporter.deadlines_s
        due += [at_s for at_s in (self._exit_by_s, self._fence_s) if at_s is not None]
        return min(due, default=None)

    def check_report(self, report: WorkerReport) -> str | None:
        """Return what a worker says that cannot be: an iteration that this pod was never told; None: nothing.

        Without a plan nobody here knows: the memory of the agent before this one may be lost.
        """
        plan = self.instructions.plan
        last = MAX_CLAIMED if plan is None or not self.settings.is_in_process else plan.iteration
        fault = -1 if report.fault is None else report.fault.iteration
        for where, seen in (("iteration", report.iteration), ("fault.iteration", fault)):
            if seen > last:
                return f"WorkerReport.{where}: want -1 to {last}, got {seen}"
        return None

    # -------------------------------------------------------------------------------------------------------- events

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Note one event and return the actions that are due, in order."""
        self.take(event, now_s)
        return self.settle(now_s)

    def take(self, event: Event, now_s: float) -> None:
        """Note one event. Several may be taken before one `settle`."""
        match event:
            case LauncherAttached() | LauncherReported() | LauncherLost() | PairsReported():
                self._take_launcher(event)
            case WorkerAttached() | WorkerReported() | WorkerLost() | WorkerDied():
                self._take_worker(event, now_s)
            case Connected() | RendezvousSent() | Disconnected() | ConnectionRefused():
                self._take_rendezvous(event, now_s)
            case Ticked() | LinesReported():
                self._take_look(event, now_s)
            case KeeperSeen(held=held):
                self.reporter.held = held
            case KeeperStarted() | KeeperAsked():
                self._keeping.note_keeper(event)
            case WatchReported() | WatchLost() | PreflightReported():
                self._watching.note(event, now_s)
                self._note_health()
            case Terminated():
                self._is_terminated = True
                self._exit_by_s = now_s + self.settings.timeouts.termination_grace_s + _EXIT_MARGIN_S
            case _:
                assert_never(event)

    def _take_look(self, event: Ticked | LinesReported, now_s: float) -> None:
        """Note what stamps say of the workers, or what they print."""
        if isinstance(event, LinesReported):
            self.log_lines.take(event.message, self.places, self.workers, now_s)
            self._note_health()
            return
        note_hangs(self.places, self.workers, event, now_s, self.settings.timeouts)
        is_news = self._watching.look(now_s)
        if self.log_lines.expire(now_s) or is_news:
            self._note_health()

    def _note_health(self) -> None:
        """Report what watch and preflight have found, and what log rules say is slow."""
        found, slow = self._watching.health, self.log_lines.findings
        if slow:
            watched = Health(()) if found is None else found
            joined = bounded((*watched.findings, *slow))
            found = replace(joined, num_dropped=joined.num_dropped + watched.num_dropped)
        elif found is None and self.reporter.health is not None:
            found = Health(())
        self.reporter.health = found

    def _take_launcher(self, event: LauncherAttached | LauncherReported | LauncherLost | PairsReported) -> None:
        match event:
            case LauncherAttached():
                self._has_launcher, self._is_launcher_lost = True, False
                self.orders.forget_launcher()
                self._is_follow_due = bool(self.settings.log_rules)
                self._pairs.attach()
            case LauncherReported(message=processes):
                self._receive_processes(processes)
            case LauncherLost():
                self._has_launcher, self._is_launcher_lost = False, True
                self._pairs.lose()
                for place in self.places:
                    place.lose_launcher()
            case PairsReported(message=said):
                self._pairs.take(said)
            case _:
                assert_never(event)

    def _take_worker(self, event: WorkerAttached | WorkerReported | WorkerLost | WorkerDied, now_s: float) -> None:
        spoken = event.attach if isinstance(event, WorkerAttached) else event
        place = self._place(spoken.local_rank, spoken.incarnation)
        if place is None:
            return
        match event:
            case WorkerAttached():
                place.attach(event.attach.stack_signal)
                self._contact.note_away(now_s - min(event.attach.away_s, _MOST_AWAY_S))
            case WorkerReported(message=report):
                place.receive(report)
                note_answer(place, self.settings.timeouts.soft_s)
            case WorkerLost():
                place.detach()
            case WorkerDied():
                place.incarnation = replace(place.incarnation, is_ending=True)
            case _:
                assert_never(event)

    def _take_rendezvous(
        self, event: Connected | RendezvousSent | Disconnected | ConnectionRefused, now_s: float
    ) -> None:
        match event:
            case Connected():
                self.reporter.connect()
            case RendezvousSent(message=message):
                self._receive(message)
            case Disconnected():
                self.reporter.disconnect()
                self._contact.note_lost(now_s)
            case ConnectionRefused():
                self._contact.note_absent(now_s)
            case _:
                assert_never(event)

    def _place(self, local_rank: int, incarnation: int) -> LocalPlace | None:
        """Return the place if this incarnation is the one that is wanted there."""
        if not 0 <= local_rank < len(self.places) or self.places[local_rank].incarnation.number != incarnation:
            return None
        return self.places[local_rank]

    def _receive_processes(self, message: Processes) -> None:
        self._is_launcher_leaving, self.orders.is_draining = message.is_leaving, message.is_draining
        for state in message.processes:
            if not 0 <= state.local_rank < len(self.places) or state.incarnation > MAX_CLAIMED:
                continue
            place = self.places[state.local_rank]
            if state.incarnation > place.incarnation.number:
                # This agent was restarted: the launcher knows more.
                place.advance(state.incarnation)
            place.process = state
            if state.exit_code is not None and state.incarnation == place.incarnation.number:
                place.incarnation = replace(place.incarnation, must_be_ready_by_s=None)
            self._recall(place)

    def _recall(self, place: LocalPlace) -> None:
        """Give a place its part of the plan that an earlier agent of this pod received."""
        plan, rank = self.instructions.plan, place.local_rank
        if plan is None or place.incarnation.part is not None or rank >= len(self._planned):
            return
        part = next((part for part in plan.ranks if part.local_rank == rank), None)
        if part is None or self._planned[rank] != place.incarnation.number:
            return
        place.incarnation = replace(place.incarnation, part=part)
        if place.present is None:
            return
        if not self.settings.is_in_process:
            place.entered = max(place.entered, plan.iteration)
        elif part.rank is not None and place.connection.report is None:
            # It may be slow to reconnect (a held GIL, a stopped process): it is still the same worker.
            report = WorkerReport(WorkerPhase.RUNNING, plan.iteration)
            place.incarnation = replace(place.incarnation, earlier_report=report)

    def _receive(self, message: RendezvousMessage) -> None:
        instructions = self.instructions
        if isinstance(message, Refused):
            self._hang_up = CloseConnection(f"refused by the rendezvous: {message.reason}", _REFUSED_RETRY_S)
            return
        if isinstance(message, Welcome) and not self.reporter.is_welcome_due:
            self._hang_up = CloseConnection("Welcome: want it as the answer to Hello, got it before", _REFUSED_RETRY_S)
            return
        if message.term < instructions.term:
            if isinstance(message, Welcome):
                reason = f"term: want at least {instructions.term}, got {message.term}"
                self._hang_up = CloseConnection(reason, _REFUSED_RETRY_S)
            return
        instructions.term = message.term
        if isinstance(message, (Certificate, Buddies)):
            self._keeping.receive(message)
        elif isinstance(message, PairOrder):
            self._pairs.receive(message)
        else:
            self._obey(message)

    def _obey(self, message: Welcome | Halt | Interrupt | Plan | Respawn | Consult | Finish) -> None:
        instructions = self.instructions
        match message:
            case Welcome(heartbeat_interval_s=interval_s):
                instructions.closed = message.over
                self.reporter.welcome(interval_s)
                self._contact.note_contact()
                self._keeping.welcome(message.copies)
            case Interrupt(iteration=iteration):
                if iteration > instructions.interrupted:
                    note_activities(self.places, message, self.settings)
                confirm_faults(self.places, iteration)
                if iteration > instructions.interrupted:
                    instructions.interrupted, instructions.interrupt = iteration, message
            case Plan():
                self._adopt(message)
            case Respawn(places=wanted):
                for local_rank, incarnation in wanted:
                    place = self._place(local_rank, incarnation)
                    if place is not None:
                        place.advance(incarnation + 1)
            case Halt() | Consult() | Finish():
                instructions.note(message)
            case _:
                assert_never(message)

    def _adopt(self, plan: Plan) -> None:
        """Adopt a plan unless it is older than the current one; adopting it twice changes nothing."""
        present = self.instructions.plan
        if present is not None and (plan.term, plan.iteration) <= (present.term, present.iteration):
            return
        confirm_faults(self.places, plan.iteration - 1)
        is_same_iteration = present is not None and present.iteration == plan.iteration
        self.instructions.plan = plan
        parts = {part.local_rank: part for part in plan.ranks}
        for place in self.places:
            if is_same_iteration and place.incarnation.part is None:
                # A new coordinator confirms the plan; a process that came later still has no part in it.
                continue
            part = parts.get(place.local_rank)
            place.incarnation = replace(place.incarnation, part=part, is_passed_over=False)
        incarnations = (place.incarnation for place in self.places)
        self._planned = tuple(each.number if each.part else -1 for each in incarnations)

    # ------------------------------------------------------------------------------------------------------- actions

    def settle(self, now_s: float) -> list[Action]:
        """Return the actions that lead to the wanted state; a second call returns none."""
        actions: list[Action] = []
        if self._hang_up is not None:
            actions.append(self._hang_up)
            self._hang_up = None
            self.reporter.hang_up()
        self._fence(now_s)
        if self.settings.is_in_process and self.instructions.finish is None:
            note_absent(self.places, now_s, self.settings.timeouts)
        workers = self.workers
        if self.settings.is_in_process and self.is_accepted:
            interrupt_early(self.instructions, self.places, workers, self.identity.pod)
        actions += self._remember()
        self.reporter.note_faults(workers, now_s)
        self._ages.note(self.instructions, workers, now_s)
        if self._is_follow_due:
            self._is_follow_due = False
            actions.append(SendToLauncher(Follow(self.settings.log_rules)))
        actions += self._pairs.settle(has_launcher=self._has_launcher, has_ranks=self.instructions.has_ranks)
        actions += self.orders.issue(workers, self._has_launcher, self.is_accepted, self._contact.lost_since_s, now_s)
        if self.settings.log_rules and self.log_lines.note_entries(self.places, self.workers, now_s):
            self._note_health()
        actions += self._report(now_s)
        actions += self._keeping.settle(self.is_accepted, restart_of(self.instructions))
        actions += self._end(now_s)
        return actions

    @property
    def _fence_s(self) -> float | None:
        """When a pod that is cut off must leave its iteration, unless contact is restored first."""
        instructions = self.instructions
        if self._contact.lost_since_s is None or not instructions.is_plan_in_force or instructions.finish is not None:
            return None
        if instructions.plan is None:
            return None
        limit_s = longest_absence_s(instructions.plan, self.workers, self.settings.timeouts)
        return None if limit_s is None else self._contact.lost_since_s + limit_s

    def _fence(self, now_s: float) -> None:
        """Leave an iteration whose ranks may now be given to others."""
        plan, at_s = self.instructions.plan, self._fence_s
        if plan is None or at_s is None or now_s < at_s:
            return
        fault = self._contact.fence(plan, self.workers, now_s)
        self.instructions.interrupted = plan.iteration
        self.instructions.interrupt = Interrupt(
            self.instructions.term, plan.iteration, fault.cause, None, self.identity.pod, fault.detail
        )

    def _remember(self) -> list[Action]:
        instructions = self.instructions
        memory = AgentMemory(instructions.term, instructions.interrupted, instructions.plan, self._planned)
        if memory == self._memory:
            return []
        self._memory = memory
        return [Remember(memory)]

    def _may_join(self, now_s: float) -> bool:
        """Whether the pod is known well enough: running workers that Hello omits would look lost."""
        if now_s >= self.reporter.join_by_s:
            return True
        if not self._has_launcher or any(place.process is None for place in self.places):
            return False
        is_waiting = self.settings.is_in_process
        return not any(is_waiting and place.is_alive and place.connection.report is None for place in self.places)

    def _report(self, now_s: float) -> list[Action]:
        workers = self.workers
        self.reporter.pairs = self._pairs.state
        self.reporter.checkpoint_s = checkpoint_s(self.places, workers)
        self.reporter.checkpoint_after_s = checkpoint_after_s(self.places, workers)
        self.reporter.step_ago_s = step_ago_s(self.places, workers, now_s)
        self.reporter.paces = tuple(place.pace for place in self.places if place.pace is not None)
        if self.reporter.is_hello_due:
            if not self._may_join(now_s):
                return []
            self.orders.note_hello(workers)
            return [SendToRendezvous(self._hello(self.reporter.note_hello(workers, now_s), now_s))]
        is_waited_for = any(place.incarnation.must_be_ready_by_s is not None for place in self.places)
        word = self.reporter.next_message(workers, self.is_leaving, is_waited_for, now_s)
        return [] if word is None else [SendToRendezvous(word)]

    def _hello(self, workers: tuple[WorkerState, ...], now_s: float) -> Hello:
        plan, fenced = self.instructions.plan, self._contact.fenced
        if fenced is not None:
            # Otherwise the script would seem to have left by itself.
            workers = tuple(explain(worker, fenced) for worker in workers)
        return replace(
            self.identity,
            protocol=PROTOCOL,
            domains=(plan.domains if plan is not None else ()) or self.identity.domains,
            term=self.instructions.term,
            plan=plan,
            workers=workers,
            memory=self.reporter.held,
            health=self.reporter.health,
            pairs=self.reporter.pairs,
            checkpoint_s=self.reporter.checkpoint_s,
            step_ago_s=self.reporter.step_ago_s,
            entered_ago_s=self._ages.entered_ago_s(now_s),
            over_ago_s=self._ages.over_ago_s(now_s),
        )

    def _end(self, now_s: float) -> list[Action]:
        """End the agent after Finish or SIGTERM, once the launcher has ended or its time is up."""
        if self.instructions.finish is not None and self._exit_by_s is None:
            self._exit_by_s = now_s + self.orders.shutdown_grace_s + 2 * _EXIT_MARGIN_S
        if self._exit_by_s is None:
            return []
        is_released = self._is_terminated and not self._has_launcher
        is_over = self.instructions.finish is not None and self._is_launcher_lost
        is_late = now_s >= self._exit_by_s and not self.orders.is_draining
        if is_released or is_over or is_late:
            return [Exit(0)]
        return []
