"""One pod as its agent sees it, and what is to be said to whom. Pure: no clock, no socket; `step` is all there is.

    launcher ──Processes──>  ┌────────┐  ──Hello, Report, Heartbeat──>  rendezvous
             <──Spawn, End── │ Member │  <──Plan, Interrupt, Respawn──
    worker ──WorkerReport──> │        │
           <──Enter, Leave── └────────┘  <──stamps of the page, time

Level, not edge: `take` only notes facts; `settle` compares what is with what should be and says what is missing, so
that nothing depends on having seen a message. A place goes round like this (in brackets: jobs that restart processes):

    STARTING ──attached [port held]──> READY ──Enter [Spawn]──> RUNNING ──returned [exit 0]──> COMPLETED
       ^                                 ^                         │ fault, or iteration over: Leave [End]
       │ Respawn                         └──────── READY ──── STOPPING ──not READY in hard - soft──> End
      GONE <──────────────────────────────────────────────── process ended
"""

from dataclasses import replace

from unbroken.agent.decisions.events import (
    Absent,
    Action,
    Connected,
    Disconnected,
    Event,
    Exit,
    HangUp,
    LauncherAttached,
    LauncherLost,
    LauncherSaid,
    Memory,
    Remember,
    RendezvousSaid,
    TellRendezvous,
    Terminated,
    Ticked,
    WorkerAttached,
    WorkerDied,
    WorkerLost,
    WorkerSaid,
)
from unbroken.agent.decisions.fence import Contact, explain, longest_absence_s
from unbroken.agent.decisions.hang_detection import attach_patience_s, note_absent, note_hangs
from unbroken.agent.decisions.orders import Orders, Standing
from unbroken.agent.decisions.own_fault import interrupt_early, note_heard
from unbroken.agent.decisions.place import Place, in_process_state, process_state
from unbroken.agent.decisions.reporting import Speech
from unbroken_core.errors import assert_never
from unbroken_core.messages import (
    PROTOCOL,
    Consult,
    Finish,
    Halt,
    Hello,
    Interrupt,
    Plan,
    Refused,
    RendezvousMessage,
    Respawn,
    Welcome,
    WorkerState,
)
from unbroken_core.pod.pod_messages import Processes, WorkerReport
from unbroken_core.reasons import JobPhase, Role, WorkerPhase
from unbroken_core.settings import JobSettings

_ADOPTION_SHARE = 0.6
"""Part of timeouts.reconnect that an agent that was restarted waits for its pod's processes before it joins with what
it has. What is missing then counts as lost, so it waits as long as it can; the rest is for its own start."""
_REFUSED_RETRY_S = 5.0
_LAST_WORD_S = 10.0
"""Beyond every grace: an agent whose launcher does not go ends after this all the same."""


class Member:
    """The pure logic of one pod; not thread-safe. All times are monotonic seconds of one clock."""

    def __init__(self, settings: JobSettings, identity: Hello, host: str, memory: Memory, now_s: float) -> None:
        """`identity` is a Hello without state; `host` is the address at which this pod's ports are reached."""
        self.settings = settings
        self.identity = identity
        self.host = host
        self.places = [Place(rank) for rank in range(settings.ranks_per_pod)]
        self.standing = Standing(memory.generation, memory.interrupted, memory.plan)
        self.orders = Orders(settings, self.places, self.standing)
        self.speech = Speech(now_s + (0.0 if memory.plan is None else _ADOPTION_SHARE * settings.timeouts.reconnect_s))
        self._memory = memory
        self._planned = memory.planned
        self._has_launcher = False
        self._is_launcher_lost = False
        self._is_launcher_leaving = False
        self._is_terminated = False
        self._exit_by_s: float | None = None
        self._hang_up: HangUp | None = None
        self._contact = Contact(now_s)

    # ------------------------------------------------------------------------------------------------------- queries

    @property
    def is_welcome(self) -> bool:
        """Whether the rendezvous is heard, and has accepted this agent."""
        return self.speech.is_welcome

    @property
    def is_leaving(self) -> bool:
        """Whether the pod's ranks should move elsewhere."""
        return self._is_terminated or self._is_launcher_leaving or self._is_launcher_lost

    @property
    def is_whole(self) -> bool:
        """Whether the launcher has told what it has, and no worker of it is still starting."""
        return self._has_launcher and all(state.phase is not WorkerPhase.STARTING for state in self.workers)

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """All workers of the pod as they are now, in local order."""
        is_finished = self.standing.finish is not None
        if self.settings.is_in_process:
            states = [in_process_state(place, is_finished) for place in self.places]
        else:
            states = [process_state(place, self.host, is_finished) for place in self.places]
        return tuple(self._without_passed_over(place, state) for place, state in zip(self.places, states, strict=True))

    def _without_passed_over(self, place: Place, state: WorkerState) -> WorkerState:
        """Say of a worker that its part of a plan is behind it when the plan was interrupted before it was told."""
        plan, interrupted = self.standing.plan, self.standing.interrupted
        if plan is None or place.part is None or plan.iteration > interrupted:
            return state
        if state.phase is not WorkerPhase.READY or state.iteration >= plan.iteration:
            return state
        return replace(state, iteration=plan.iteration)

    @property
    def asked_for_stacks(self) -> tuple[int, ...]:
        """Local ranks of the workers that came near to the soft timeout in this iteration."""
        iteration = -1 if self.standing.plan is None else self.standing.plan.iteration
        return tuple(place.local_rank for place in self.places if place.stack_asked == iteration >= 0)

    @property
    def next_deadline_s(self) -> float | None:
        """When `step` must be called with Ticked at the latest; None when nothing is due."""
        due = [place.must_be_ready_by_s for place in self.places if place.must_be_ready_by_s is not None]
        if self.settings.is_in_process:
            limit_s = attach_patience_s(self.settings.timeouts)
            due += [
                place.alive_since_s + limit_s
                for place in self.places
                if place.alive_since_s is not None and place.found is None
            ]
        due += self.speech.deadlines_s
        due += [at_s for at_s in (self._exit_by_s, self._fence_s) if at_s is not None]
        return min(due, default=None)

    # -------------------------------------------------------------------------------------------------------- events

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Note one event and return all that is to be done now, in order."""
        self.take(event, now_s)
        return self.settle(now_s)

    def take(self, event: Event, now_s: float) -> None:
        """Note one event. Several may be taken before one `settle`."""
        match event:
            case LauncherAttached() | LauncherSaid() | LauncherLost():
                self._take_launcher(event)
            case WorkerAttached() | WorkerSaid() | WorkerLost() | WorkerDied():
                self._take_worker(event, now_s)
            case Connected() | RendezvousSaid() | Disconnected() | Absent():
                self._take_rendezvous(event, now_s)
            case Ticked():
                note_hangs(self.places, self.workers, event, now_s, self.settings.timeouts)
            case Terminated():
                self._is_terminated = True
                self._exit_by_s = now_s + self.settings.timeouts.termination_grace_s + _LAST_WORD_S
            case _:
                assert_never(event)

    def _take_launcher(self, event: LauncherAttached | LauncherSaid | LauncherLost) -> None:
        match event:
            case LauncherAttached():
                self._has_launcher, self._is_launcher_lost = True, False
                self.orders.forget_launcher()
            case LauncherSaid(message=processes):
                self._hear_launcher(processes)
            case LauncherLost():
                self._has_launcher, self._is_launcher_lost = False, True
                for place in self.places:
                    place.lose_launcher()
            case _:
                assert_never(event)

    def _take_worker(self, event: WorkerAttached | WorkerSaid | WorkerLost | WorkerDied, now_s: float) -> None:
        spoken = event.attach if isinstance(event, WorkerAttached) else event
        place = self._place(spoken.local_rank, spoken.incarnation)
        if place is None:
            return
        match event:
            case WorkerAttached():
                place.attach(event.attach.stack_signal)
                self._contact.note_away(now_s - event.attach.away_s)
            case WorkerSaid(message=report):
                place.hear(report)
            case WorkerLost():
                place.is_attached = False
            case WorkerDied():
                place.is_ending = True
            case _:
                assert_never(event)

    def _take_rendezvous(self, event: Connected | RendezvousSaid | Disconnected | Absent, now_s: float) -> None:
        match event:
            case Connected():
                self.speech.connect()
            case RendezvousSaid(message=message):
                self._hear_rendezvous(message)
            case Disconnected():
                self.speech.disconnect()
                self._contact.note_lost(now_s)
            case Absent():
                self._contact.note_absent(now_s)
            case _:
                assert_never(event)

    def _place(self, local_rank: int, incarnation: int) -> Place | None:
        """Return the place when this incarnation is the one that is wanted there."""
        if not 0 <= local_rank < len(self.places) or self.places[local_rank].wanted != incarnation:
            return None
        return self.places[local_rank]

    def _hear_launcher(self, message: Processes) -> None:
        self._is_launcher_leaving, self.orders.is_draining = message.is_leaving, message.is_draining
        for state in message.processes:
            if not 0 <= state.local_rank < len(self.places):
                continue
            place = self.places[state.local_rank]
            if state.incarnation > place.wanted:
                # This agent was restarted: the launcher knows better.
                place.advance(state.incarnation)
            place.process = state
            if state.exit_code is not None and state.incarnation == place.wanted:
                place.must_be_ready_by_s = None
            self._recall(place)

    def _recall(self, place: Place) -> None:
        """Give a place its part of a plan that a former agent of the pod received."""
        plan, rank = self.standing.plan, place.local_rank
        if plan is None or place.part is not None or rank >= len(self._planned):
            return
        if self._planned[rank] != place.wanted:
            return
        part = place.part = next((part for part in plan.ranks if part.local_rank == rank), None)
        if part is None or place.present is None:
            return
        if not self.settings.is_in_process:
            place.entered = max(place.entered, plan.iteration)
        elif part.rank is not None and place.worker is None:
            # It may be slow to come back (a held GIL, a stopped process): no reason to take it for another one.
            place.former = WorkerReport(WorkerPhase.RUNNING, plan.iteration)

    def _hear_rendezvous(self, message: RendezvousMessage) -> None:
        standing = self.standing
        if isinstance(message, Refused):
            self._hang_up = HangUp(f"refused by the rendezvous: {message.reason}", _REFUSED_RETRY_S)
            return
        if message.generation < standing.generation:
            if isinstance(message, Welcome):
                reason = f"generation: want at least {standing.generation}, got {message.generation}"
                self._hang_up = HangUp(reason, _REFUSED_RETRY_S)
            return
        standing.generation = message.generation
        self._obey(message)

    def _obey(self, message: Welcome | Halt | Interrupt | Plan | Respawn | Consult | Finish) -> None:
        standing = self.standing
        match message:
            case Welcome(heartbeat_interval_s=interval_s):
                standing.closed = message.over
                self.speech.welcome(interval_s)
                self._contact.note_heard()
            case Interrupt(iteration=iteration):
                note_heard(self.places, iteration)
                if iteration > standing.interrupted:
                    standing.interrupted, standing.interrupt = iteration, message
            case Plan():
                self._adopt(message)
            case Respawn(places=wanted):
                for local_rank, incarnation in wanted:
                    place = self._place(local_rank, incarnation)
                    if place is not None:
                        place.advance(incarnation + 1)
            case Halt() | Consult() | Finish():
                standing.note(message)
            case _:
                assert_never(message)

    def _adopt(self, plan: Plan) -> None:
        """Take a plan unless it is older than the one in force; the same one again changes nothing."""
        present = self.standing.plan
        if present is not None and (plan.generation, plan.iteration) <= (present.generation, present.iteration):
            return
        note_heard(self.places, plan.iteration - 1)
        is_same_iteration = present is not None and present.iteration == plan.iteration
        self.standing.plan = plan
        parts = {part.local_rank: part for part in plan.ranks}
        for place in self.places:
            if is_same_iteration and place.part is None:
                # Confirmed by a new coordinator; a process that came later still has no part in it.
                continue
            place.part, place.is_passed_over = parts.get(place.local_rank), False
        self._planned = tuple(place.wanted if place.part else -1 for place in self.places)

    # ------------------------------------------------------------------------------------------------------- actions

    def settle(self, now_s: float) -> list[Action]:
        """Return what is missing between what is and what should be; a second call returns nothing."""
        actions: list[Action] = []
        if self._hang_up is not None:
            actions.append(self._hang_up)
            self._hang_up = None
            self.speech.hang_up()
        self._fence(now_s)
        if self.settings.is_in_process and self.standing.finish is None:
            note_absent(self.places, now_s, self.settings.timeouts)
        workers = self.workers
        if self.settings.is_in_process and self.is_welcome:
            interrupt_early(self.standing, self.places, workers, self.identity.pod)
        actions += self._remember()
        self.speech.note_faults(workers, now_s)
        actions += self.orders.issue(workers, self._has_launcher, self.is_welcome, self._contact.lost_since_s, now_s)
        actions += self._speak(now_s)
        actions += self._end(now_s)
        return actions

    @property
    def _fence_s(self) -> float | None:
        """When a pod that is cut off must leave its iteration, unless it is in touch before."""
        standing = self.standing
        if self._contact.lost_since_s is None or not standing.is_plan_in_force or standing.finish is not None:
            return None
        if standing.plan is None:
            return None
        limit_s = longest_absence_s(standing.plan, self.workers, self.settings.timeouts)
        return None if limit_s is None else self._contact.lost_since_s + limit_s

    def _fence(self, now_s: float) -> None:
        """Leave an iteration whose ranks somebody else may be given now."""
        plan, at_s = self.standing.plan, self._fence_s
        if plan is None or at_s is None or now_s < at_s:
            return
        fault = self._contact.fence(plan, self.workers, now_s)
        self.standing.interrupted = plan.iteration
        self.standing.interrupt = Interrupt(
            self.standing.generation, plan.iteration, fault.cause, None, self.identity.pod, fault.detail
        )

    def _remember(self) -> list[Action]:
        standing = self.standing
        memory = Memory(standing.generation, standing.interrupted, standing.plan, self._planned)
        if memory == self._memory:
            return []
        self._memory = memory
        return [Remember(memory)]

    def _may_join(self, now_s: float) -> bool:
        """Whether the pod is known well enough: a Hello that lacks running workers would make them look lost."""
        if now_s >= self.speech.join_by_s:
            return True
        if not self._has_launcher or any(place.process is None for place in self.places):
            return False
        is_waiting = self.settings.is_in_process
        return not any(is_waiting and place.is_alive and place.worker is None for place in self.places)

    def _speak(self, now_s: float) -> list[Action]:
        workers = self.workers
        if self.speech.is_hello_due:
            if not self._may_join(now_s):
                return []
            self.orders.note_hello(workers)
            return [TellRendezvous(self._hello(self.speech.greet(workers, now_s)))]
        is_waited_for = any(place.must_be_ready_by_s is not None for place in self.places)
        word = self.speech.next_word(workers, self.is_leaving, is_waited_for, now_s)
        return [] if word is None else [TellRendezvous(word)]

    def _hello(self, workers: tuple[WorkerState, ...]) -> Hello:
        plan, fenced = self.standing.plan, self._contact.fenced
        if fenced is not None:
            # Otherwise it would look as if the script had left by itself.
            workers = tuple(explain(worker, fenced) for worker in workers)
        return replace(
            self.identity,
            protocol=PROTOCOL,
            domains=(plan.domains if plan is not None else ()) or self.identity.domains,
            generation=self.standing.generation,
            plan=plan,
            workers=workers,
        )

    def _end(self, now_s: float) -> list[Action]:
        """Leave once the pod is over: after Finish or SIGTERM when the launcher is gone, or when its time is up."""
        if self.standing.finish is not None and self._exit_by_s is None:
            self._exit_by_s = now_s + self.orders.shutdown_grace_s + 2 * _LAST_WORD_S
        if self._exit_by_s is None:
            return []
        is_released = self._is_terminated and not self._has_launcher
        is_over = self.standing.finish is not None and self._is_launcher_lost
        is_late = now_s >= self._exit_by_s and not self.orders.is_draining
        if is_released or is_over or is_late:
            return [Exit(0)]
        return []

    @property
    def role(self) -> Role:
        """Role of the pod in the plan in force; spare before the first."""
        return self.standing.plan.role if self.standing.plan is not None else Role.SPARE

    @property
    def outcome(self) -> JobPhase | None:
        """COMPLETE or FAILED once the job is over."""
        return self.standing.finish.outcome if self.standing.finish is not None else None
