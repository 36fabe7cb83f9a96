"""The pure logic of a pod: what its agent says to whom after each event."""

from dataclasses import replace

import pytest

from unbroken.agent.decisions.events import (
    Action,
    AgentMemory,
    CloseConnection,
    Connected,
    Disconnected,
    Event,
    Exit,
    KeeperStarted,
    LauncherAttached,
    LauncherLost,
    LauncherReported,
    Remember,
    RendezvousSent,
    SendToKeeper,
    SendToLauncher,
    SendToRendezvous,
    SendToWorker,
    Terminated,
    Ticked,
    WorkerAttached,
    WorkerDied,
    WorkerLost,
    WorkerReported,
)
from unbroken.agent.decisions.member import PodMember
from unbroken_core.pod.memory_messages import Restarting, Unranked
from unbroken_core.pod.pod_messages import (
    UNKNOWN_EXIT,
    Attach,
    DumpStack,
    End,
    Enter,
    Inspect,
    Leave,
    Processes,
    ProcessState,
    Release,
    Shutdown,
    Spawn,
    WorkerReport,
)
from unbroken_core.pod.stamps import FLAG_IN_FUNCTION, WorkerStamps
from unbroken_core.protocol.messages import (
    PROTOCOL,
    Fault,
    Finish,
    Heartbeat,
    Hello,
    Interrupt,
    Plan,
    RankPlan,
    Refused,
    RendezvousMessage,
    Report,
    Respawn,
    Welcome,
    WorkerState,
)
from unbroken_core.protocol.settings import JobSettings, RungBudget, Timeouts
from unbroken_core.vocabulary.reasons import Cause, JobPhase, RankReason, Reason, Role, Rung, WorkerPhase

TIMEOUTS = Timeouts(soft_s=10, hard_s=30, barrier_s=60, termination_grace_s=5)
IN_PROCESS = JobSettings("digits", replicas=2, ranks_per_pod=2, timeouts=TIMEOUTS)
PROCESS = replace(IN_PROCESS, rungs=(RungBudget(Rung.PROCESS), RungBudget(Rung.POD)))
IDENTITY = Hello(PROTOCOL, "digits", "digits-0", "uid-0", "s", "node-0", 2)


class Pod:
    """A member in virtual time."""

    def __init__(self, settings: JobSettings = IN_PROCESS, memory: AgentMemory | None = None) -> None:
        self.now_s = 1000.0
        self.warnings: list[Action] = []
        """Of the last step."""
        self.member = PodMember(settings, IDENTITY, "127.0.0.9", memory or AgentMemory(), self.now_s)

    def step(self, *events: Event) -> list[Action]:
        """Take events one after the other and return all actions but Remember and warnings."""
        actions = [action for event in events for action in self.member.step(event, self.now_s)]
        assert self.member.settle(self.now_s) == [], "settling twice must change nothing"
        self.warnings = [action for action in actions if self._is_warning(action)]
        return [action for action in actions if not isinstance(action, Remember) and not self._is_warning(action)]

    def _is_warning(self, action: Action) -> bool:
        """Return whether an Enter only tells a worker that is in since when the rendezvous is not heard."""
        if not isinstance(action, SendToWorker) or not isinstance(action.message, Enter):
            return False
        worker = self.member.places[action.local_rank].connection.report
        return worker is not None and worker.phase is not WorkerPhase.READY

    def after(self, seconds: float) -> list[Action]:
        """Let time pass."""
        self.now_s += seconds
        return self.step(Ticked())

    def hear(self, message: RendezvousMessage) -> list[Action]:
        """Take a message of the rendezvous."""
        return self.step(RendezvousSent(message))

    def join(self) -> list[Action]:
        """Connect and be accepted."""
        return self.step(Connected(), RendezvousSent(Welcome(PROTOCOL, 1, 5.0)))

    def start_workers(self, incarnation: int = 0) -> None:
        """Let launcher and workers attach and say READY."""
        self.step(LauncherAttached(), LauncherReported(processes()))
        self.step(LauncherReported(processes(running(0, incarnation), running(1, incarnation))))
        for rank in (0, 1):
            self.step(WorkerAttached(Attach(PROTOCOL, "worker", 50 + rank, rank, incarnation)))
            self.step(WorkerReported(rank, incarnation, ready(rank)))

    def run(self) -> None:
        """Bring both workers of an in-process job into iteration 0; the rendezvous has been told."""
        self.join()
        self.start_workers()
        self.hear(plan(0))
        for rank in (0, 1):
            self.step(WorkerReported(rank, 0, WorkerReport(WorkerPhase.RUNNING, 0)))
        self.after(0.06)


def empty(local_rank: int, port: int = 700) -> ProcessState:
    return ProcessState(local_rank, -1, 0, port=port + local_rank)


def running(local_rank: int, incarnation: int = 0) -> ProcessState:
    return ProcessState(local_rank, incarnation, 50 + local_rank, port=700 + local_rank)


def ended(local_rank: int, code: int, incarnation: int = 0, error: str = "") -> ProcessState:
    return ProcessState(local_rank, incarnation, 50 + local_rank, code, error, 800 + local_rank)


def processes(*states: ProcessState) -> Processes:
    return Processes(states or (empty(0), empty(1)))


def ready(local_rank: int, iteration: int = -1) -> WorkerReport:
    return WorkerReport(WorkerPhase.READY, iteration, "127.0.0.9", 600 + local_rank)


def plan(iteration: int, term: int = 1, role: Role = Role.ACTIVE) -> Plan:
    ranks = tuple(RankPlan(i, i if role is Role.ACTIVE else None, RankReason.FIRST) for i in (0, 1))
    return Plan(term, iteration, role, 4, "127.0.0.9", 600, ranks, ("r1",), 2)


def entered(actions: list[Action]) -> list[int]:
    """Return the iteration of each order to enter one, or to start a process for one."""
    orders = [action.message for action in actions if isinstance(action, (SendToWorker, SendToLauncher))]
    spawned = [order.environment["TORCHELASTIC_RESTART_COUNT"] for order in orders if isinstance(order, Spawn)]
    return [order.iteration for order in orders if isinstance(order, Enter)] + [int(number) for number in spawned]


def interrupt(iteration: int, term: int = 1) -> Interrupt:
    return Interrupt(term, iteration, Cause.EXCEPTION, 3, "digits-1", "boom")


def phases(actions: list[Action]) -> list[tuple[WorkerPhase, int, int]]:
    """Return (phase, iteration, incarnation) of each worker in the only Report, or Hello."""
    (report,) = [
        a.message for a in actions if isinstance(a, SendToRendezvous) and isinstance(a.message, (Hello, Report))
    ]
    return [(worker.phase, worker.iteration, worker.incarnation) for worker in report.workers]


def faults(pod: Pod) -> list[Fault | None]:
    return [worker.fault for worker in pod.member.workers]


def test_first_hello_is_sent_at_once_with_workers_that_are_starting() -> None:
    starting = tuple(WorkerState(rank, 0, WorkerPhase.STARTING) for rank in (0, 1))
    assert Pod().step(Connected()) == [SendToRendezvous(replace(IDENTITY, workers=starting))]


def test_in_process_workers_are_started_when_the_launcher_has_told_what_it_has() -> None:
    pod = Pod()
    assert pod.step(LauncherAttached()) == []
    spawns = [SendToLauncher(Spawn(rank, 0, {})) for rank in (0, 1)]
    assert pod.step(LauncherReported(processes())) == spawns
    assert pod.step(LauncherReported(processes())) == []


def test_launcher_that_reconnects_gets_its_orders_again() -> None:
    pod = Pod()
    pod.step(LauncherAttached(), LauncherReported(processes()))
    assert len(pod.step(LauncherLost(), LauncherAttached(), LauncherReported(processes()))) == 2


def test_events_of_one_pass_make_one_report() -> None:
    pod = Pod()
    pod.join()
    pod.start_workers()
    pod.hear(plan(0))
    for rank in (0, 1):
        pod.member.take(WorkerReported(rank, 0, WorkerReport(WorkerPhase.RUNNING, 0, has_progress=True)), pod.now_s)
    assert phases(pod.member.settle(pod.now_s)) == [(WorkerPhase.RUNNING, 0, 0)] * 2


def test_workers_that_leave_an_iteration_are_told_of_together() -> None:
    """Each report costs time that the restart takes longer, and the plan waits for all of them."""
    pod = Pod()
    pod.run()
    pod.hear(interrupt(0))
    assert pod.step(WorkerReported(0, 0, ready(0, 0))) == []
    assert phases(pod.step(WorkerReported(1, 0, ready(1, 0)))) == [(WorkerPhase.READY, 0, 0)] * 2


def test_worker_that_has_left_is_told_of_without_the_others_when_they_take_long_or_have_a_fault() -> None:
    pod = Pod()
    pod.run()
    pod.hear(interrupt(0))
    assert pod.step(WorkerReported(0, 0, ready(0, 0))) == []
    due_s = pod.member.next_deadline_s
    assert due_s is not None
    assert due_s < pod.now_s + 0.1
    assert phases(pod.after(0.1)) == [(WorkerPhase.READY, 0, 0), (WorkerPhase.RUNNING, 0, 0)]
    assert pod.after(0.1) == []
    pod = Pod()
    pod.run()
    pod.hear(interrupt(0))
    assert pod.step(WorkerReported(0, 0, ready(0, 0))) == []
    fault = Fault(Cause.EXCEPTION, 0, "boom")
    stopping = WorkerReport(WorkerPhase.STOPPING, 0, fault=fault)
    assert phases(pod.step(WorkerReported(1, 0, stopping))) == [(WorkerPhase.READY, 0, 0), (WorkerPhase.STOPPING, 0, 0)]


def test_worker_that_was_told_to_enter_is_not_reported_as_ready_any_more() -> None:
    pod = Pod()
    pod.join()
    pod.start_workers()
    actions = pod.hear(plan(0))
    enters = [SendToWorker(rank, Enter(1, 0, rank, 4, "127.0.0.9", 600, 2, 85.0, window_s=60.0)) for rank in (0, 1)]
    assert actions == enters
    assert phases(pod.after(0.06)) == [(WorkerPhase.RUNNING, 0, 0)] * 2
    assert pod.hear(plan(0)) == []


def test_entry_is_told_when_groups_are_formed_with_its_age() -> None:
    """The workers need the cores to form their groups; the recovery is recorded as long as it was."""
    pod = Pod()
    pod.join()
    pod.start_workers()
    pod.hear(plan(0))
    due_s = pod.member.next_deadline_s
    assert due_s == pytest.approx(pod.now_s + 0.05)
    assert pod.after(0.04) == []
    (told,) = pod.after(0.02)
    assert isinstance(told, SendToRendezvous)
    assert isinstance(told.message, Report)
    assert told.message.entered_ago_s == pytest.approx(0.06)
    assert pod.after(0.1) == []


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(WorkerReport(WorkerPhase.RUNNING, 0, has_progress=True), id="progress"),
        pytest.param(WorkerReport(WorkerPhase.STOPPING, 0, fault=Fault(Cause.EXCEPTION, 0, "boom")), id="fault"),
        pytest.param(WorkerReport(WorkerPhase.COMPLETED, 0), id="completed"),
    ],
)
def test_other_news_takes_an_entry_along_that_is_not_told_yet(report: WorkerReport) -> None:
    pod = Pod()
    pod.join()
    pod.start_workers()
    pod.hear(plan(0))
    pod.now_s += 0.03
    told = [action.message for action in pod.step(WorkerReported(0, 0, report)) if isinstance(action, SendToRendezvous)]
    (message,) = told
    assert isinstance(message, Report)
    assert [state.phase for state in message.workers] == [report.phase, WorkerPhase.RUNNING]
    assert message.entered_ago_s == pytest.approx(0.03)
    assert not [action for action in pod.after(0.1) if isinstance(action, SendToRendezvous)]


def test_spare_is_told_its_part_and_stays_ready() -> None:
    pod = Pod()
    pod.join()
    pod.start_workers()
    actions = pod.hear(plan(0, role=Role.SPARE))
    enters = [a.message for a in actions if isinstance(a, SendToWorker) and isinstance(a.message, Enter)]
    assert [enter.rank for enter in enters] == [None, None]
    assert phases(actions) == [(WorkerPhase.READY, 0, 0)] * 2


def test_interruption_is_passed_to_both_workers_once_and_readiness_ends_its_time_box() -> None:
    pod = Pod()
    pod.run()
    leaves = [SendToWorker(rank, Leave(0, Cause.EXCEPTION, 3, "boom")) for rank in (0, 1)]
    assert pod.hear(interrupt(0)) == leaves
    assert pod.hear(interrupt(0)) == []
    for rank in (0, 1):
        pod.step(WorkerReported(rank, 0, ready(rank, 0)))
    assert not any(isinstance(action, SendToLauncher) for action in pod.after(1000))
    assert [worker.fault for worker in pod.member.workers] == [None, None]


def test_keeper_that_copies_hears_of_an_interruption_after_the_workers_and_of_no_plan() -> None:
    pod = Pod()
    pod.run()
    pod.step(Connected(), RendezvousSent(Welcome(PROTOCOL, 1, 5.0, copies=1)), KeeperStarted())
    leaves = [SendToWorker(rank, Leave(0, Cause.EXCEPTION, 3, "boom")) for rank in (0, 1)]
    assert pod.hear(interrupt(0)) == [*leaves, SendToKeeper(Restarting(0))]
    assert not any(isinstance(action, SendToKeeper) for action in pod.hear(plan(1)))


def test_keeper_of_a_pod_without_a_rank_waits_for_no_restore() -> None:
    pod = Pod()
    pod.run()
    pod.step(Connected(), RendezvousSent(Welcome(PROTOCOL, 1, 5.0, copies=1)), KeeperStarted())
    assert SendToKeeper(Restarting(0)) in pod.hear(interrupt(0))
    spare = replace(plan(1), ranks=tuple(replace(part, rank=None) for part in plan(1).ranks))
    assert SendToKeeper(Unranked(1)) in pod.hear(spare)
    assert SendToKeeper(Unranked(1)) in pod.step(KeeperStarted())
    assert SendToKeeper(Restarting(1)) in pod.hear(interrupt(1))


def test_worker_that_does_not_leave_in_hard_minus_soft_is_ended_and_named() -> None:
    """2.22"""
    pod = Pod()
    pod.run()
    pod.hear(interrupt(0))
    pod.step(WorkerReported(0, 0, ready(0, 0)))
    assert not any(isinstance(action, SendToLauncher) for action in pod.after(19.9))
    actions = pod.after(0.2)
    assert SendToLauncher(End(1, 0, 5)) in actions
    actions = pod.step(LauncherReported(processes(running(0), ended(1, -9))))
    assert phases(actions) == [(WorkerPhase.READY, 0, 0), (WorkerPhase.GONE, 0, 0)]
    fault = faults(pod)[1]
    assert fault is not None
    assert fault.cause is Cause.HARD_TIMEOUT


def test_a_dead_worker_whose_launcher_says_nothing_is_not_said_to_have_been_ended() -> None:
    """As where the launcher is stopped: the script is not to blame. 2.22"""
    pod = Pod()
    pod.run()
    pod.step(WorkerDied(1, 0))
    pod.hear(interrupt(0))
    pod.after(19.9)
    assert pod.member.workers[1].phase is WorkerPhase.RUNNING, "nobody knows yet whether its process ends"
    assert phases(pod.after(0.2))[1] == (WorkerPhase.GONE, 0, 0), "for which nobody waits"
    fault = faults(pod)[1]
    assert fault is not None
    assert fault.cause is Cause.HARD_TIMEOUT
    assert fault.detail.startswith("its main thread has ended; the pod's launcher does not say how")
    pod.hear(Respawn(1, ((1, 0),), Cause.HARD_TIMEOUT))
    woken = pod.step(LauncherReported(processes(running(0), ended(1, -9))))
    assert SendToLauncher(Spawn(1, 1, {})) in woken


@pytest.mark.parametrize(
    ("code", "error", "cause", "detail"),
    [
        pytest.param(-9, "", Cause.PROCESS_SIGNAL, "killed by signal 9 (SIGKILL)", id="signal"),
        pytest.param(3, "ValueError: x", Cause.PROCESS_EXIT, "exited with code 3: ValueError: x", id="exit code"),
        pytest.param(
            0,
            "",
            Cause.PROCESS_EXIT,
            "exited with code 0 before it completed (does the script call unbroken.inprocess.Wrapper?)",
            id="no wrapper",
        ),
    ],
)
def test_end_of_a_process_is_reported_with_what_is_known(code: int, error: str, cause: Cause, detail: str) -> None:
    pod = Pod()
    pod.run()
    pod.step(LauncherReported(processes(running(0), ended(1, code, error=error))))
    assert faults(pod) == [None, Fault(cause, 0, detail, exit_code=code if code > 0 else None)]
    assert pod.member.workers[1].phase is WorkerPhase.GONE


def test_own_word_of_a_worker_that_leaves_counts_more_than_its_exit_code() -> None:
    pod = Pod()
    pod.run()
    own = Fault(Cause.BASE_EXCEPTION, 0, "SystemExit: 7")
    pod.step(WorkerReported(1, 0, WorkerReport(WorkerPhase.STOPPING, 0, fault=own)))
    pod.step(LauncherReported(processes(running(0), ended(1, 7))))
    assert (faults(pod)[1], pod.member.workers[1].phase) == (replace(own, exit_code=7), WorkerPhase.GONE)


@pytest.mark.parametrize("cause", [Cause.STALE_STATE, Cause.BASE_EXCEPTION])
def test_own_word_of_a_worker_that_leaves_counts_more_than_that_its_process_takes_long_to_end(cause: Cause) -> None:
    pod = Pod()
    pod.run()
    own = Fault(cause, 0, "why it leaves")
    pod.step(WorkerReported(1, 0, WorkerReport(WorkerPhase.STOPPING, 0, fault=own)))
    pod.hear(interrupt(0))
    assert SendToLauncher(End(1, 0, 5)) in pod.after(20.1)
    assert faults(pod)[1] == own
    pod.step(LauncherReported(processes(running(0), ended(1, -9))))
    assert faults(pod)[1] == own


def test_respawn_starts_the_next_incarnation_once_and_leaves_a_newer_one_alone() -> None:
    pod = Pod()
    pod.run()
    pod.step(LauncherReported(processes(running(0), ended(1, -9))))
    respawn = Respawn(1, ((1, 0),), Cause.PROCESS_SIGNAL)
    actions = pod.hear(respawn)
    assert SendToLauncher(Spawn(1, 1, {})) in actions
    assert phases(actions)[1] == (WorkerPhase.STARTING, -1, 1)
    assert pod.hear(respawn) == []


def test_launcher_is_asked_once_how_a_process_ends_whose_main_thread_has_ended() -> None:
    """And again when it is another launcher's connection; what it says is told at once. 2.22"""
    pod = Pod()
    pod.run()
    inspect = SendToLauncher(Inspect(1, 0))
    assert pod.step(WorkerDied(1, 1), WorkerDied(1, 0), WorkerDied(1, 0)) == [inspect]
    assert pod.step(LauncherAttached(), LauncherReported(processes(running(0), running(1)))) == [inspect]
    assert pod.member.workers[1].phase is WorkerPhase.RUNNING, "nobody knows yet whether its process ends"
    actions = pod.step(LauncherReported(processes(running(0), ended(1, -9))))
    assert phases(actions)[1] == (WorkerPhase.GONE, 0, 0)
    assert faults(pod)[1] == Fault(Cause.PROCESS_SIGNAL, 0, "killed by signal 9 (SIGKILL)")
    pod.hear(Respawn(1, ((1, 0),), Cause.PROCESS_SIGNAL))
    assert pod.step(LauncherReported(processes(running(0), running(1, 1)))) == []


def test_respawn_of_a_stuck_process_ends_it_first() -> None:
    pod = Pod()
    pod.run()
    assert SendToLauncher(End(1, 0, 5)) in pod.hear(Respawn(1, ((1, 0),), Cause.HARD_TIMEOUT))
    assert pod.step(LauncherReported(processes(running(0), ended(1, -9)))) == [SendToLauncher(Spawn(1, 1, {}))]


def raised(local_rank: int) -> WorkerReported:
    return WorkerReported(local_rank, 0, WorkerReport(WorkerPhase.STOPPING, 0, fault=Fault(Cause.EXCEPTION, 0, "boom")))


def test_fault_of_one_worker_lets_the_pod_leave_at_once_and_is_told_until_the_rendezvous_has_heard_it() -> None:
    """A worker that has left speaks of its fault no more, and what is sent may be lost with the connection."""
    pod = Pod()
    pod.run()
    actions = pod.step(raised(1))
    leave = Leave(0, Cause.EXCEPTION, 1, "boom")
    assert [item for item in actions if isinstance(item, SendToWorker)] == [
        SendToWorker(0, leave),
        SendToWorker(1, leave),
    ]
    assert phases(actions)[1] == (WorkerPhase.STOPPING, 0, 0)
    pod.step(WorkerReported(1, 0, ready(1, 0)))
    (told,) = pod.step(Disconnected(), Connected())
    assert isinstance(told, SendToRendezvous)
    assert isinstance(told.message, Hello)
    assert [(worker.phase, worker.fault) for worker in told.message.workers] == [
        (WorkerPhase.RUNNING, None),
        (WorkerPhase.READY, Fault(Cause.EXCEPTION, 0, "boom")),
    ]
    pod.hear(Welcome(PROTOCOL, 1, 5.0))
    pod.hear(Interrupt(1, 0, Cause.EXCEPTION, 1, "digits-0", "boom"))
    assert [worker.fault for worker in pod.member.workers] == [None, None]


def test_end_of_a_process_lets_the_others_of_its_pod_leave_at_once() -> None:
    pod = Pod()
    pod.run()
    leave = Leave(0, Cause.PROCESS_SIGNAL, 1, "killed by signal 9 (SIGKILL)")
    assert SendToWorker(0, leave) in pod.step(LauncherReported(processes(running(0), ended(1, -9))))


def test_fault_of_a_spare_or_of_an_older_iteration_ends_nothing() -> None:
    pod = Pod()
    pod.join()
    pod.start_workers()
    pod.hear(plan(0, role=Role.SPARE))
    assert not any(isinstance(action, SendToWorker) for action in pod.step(raised(1)))
    pod = Pod()
    pod.run()
    pod.hear(interrupt(0))
    for rank in (0, 1):
        pod.step(WorkerReported(rank, 0, ready(rank, 0)))
    pod.hear(plan(1))
    assert not any(isinstance(action, SendToWorker) for action in pod.step(raised(1)))


def test_new_process_does_not_enter_a_plan_that_was_made_for_the_old_one() -> None:
    pod = Pod()
    pod.run()
    pod.step(LauncherReported(processes(running(0), ended(1, -9))))
    pod.hear(Respawn(1, ((1, 0),), Cause.PROCESS_SIGNAL))
    pod.step(
        LauncherReported(processes(running(0), running(1, 1))), WorkerAttached(Attach(PROTOCOL, "worker", 9, 1, 1))
    )
    pod.step(WorkerReported(0, 0, ready(0, 0)))
    actions = pod.step(WorkerReported(1, 1, ready(1)))
    assert not any(isinstance(action, SendToWorker) for action in actions)
    assert phases(actions)[1] == (WorkerPhase.READY, -1, 1)


def test_older_term_is_not_obeyed() -> None:
    pod = Pod()
    pod.run()
    pod.hear(Welcome(PROTOCOL, 5, 5.0))
    for message in (interrupt(0), plan(9), Respawn(1, ((1, 0),), Cause.EXCEPTION)):
        assert pod.hear(message) == []
    (hang_up,) = pod.hear(Welcome(PROTOCOL, 4, 5.0))
    assert isinstance(hang_up, CloseConnection)
    assert "want at least 5, got 4" in hang_up.reason


def test_refusal_closes_the_connection_and_slows_the_next_try() -> None:
    pod = Pod()
    pod.step(Connected())
    assert pod.hear(Refused("want job digits, got mnist")) == [
        CloseConnection("refused by the rendezvous: want job digits, got mnist", 5.0)
    ]


def test_training_goes_on_while_the_rendezvous_is_away_and_hello_tells_all_afterwards() -> None:
    pod = Pod()
    pod.run()
    assert pod.step(Disconnected()) == []
    assert pod.step(WorkerReported(1, 0, WorkerReport(WorkerPhase.COMPLETED, 0))) == []
    (action,) = pod.step(Connected())
    assert isinstance(action, SendToRendezvous)
    assert isinstance(action.message, Hello)
    assert (action.message.plan, action.message.term, action.message.domains) == (plan(0), 1, ("r1",))
    assert [worker.phase for worker in action.message.workers] == [WorkerPhase.RUNNING, WorkerPhase.COMPLETED]


def test_fault_that_nobody_could_be_told_of_is_told_with_its_age() -> None:
    pod = Pod()
    pod.run()
    pod.step(Disconnected())
    fault = Fault(Cause.EXCEPTION, 0, "ValueError: x", 0.5)
    pod.step(WorkerReported(1, 0, WorkerReport(WorkerPhase.STOPPING, 0, fault=fault)))
    pod.after(7.0)
    (action,) = pod.step(Connected())
    assert isinstance(action, SendToRendezvous)
    assert isinstance(action.message, Hello)
    assert action.message.workers[1].fault == replace(fault, detect_s=7.5)


def test_heartbeat_is_sent_when_there_is_nothing_else_to_say() -> None:
    """3.19"""
    pod = Pod()
    pod.join()
    pod.start_workers()
    assert pod.after(4.9) == []
    assert pod.member.next_deadline_s == pytest.approx(pod.now_s + 0.1)
    (action,) = pod.after(0.1)
    assert isinstance(action, SendToRendezvous)
    assert isinstance(action.message, Heartbeat)


def test_restarted_agent_waits_for_its_workers_before_it_joins_and_interrupts_nobody() -> None:
    first = Pod()
    first.run()
    memory = AgentMemory(1, -1, plan(0), (0, 0))
    pod = Pod(memory=memory)
    assert pod.step(Connected(), LauncherAttached(), LauncherReported(processes(running(0), running(1)))) == []
    for rank in (0, 1):
        assert pod.step(WorkerAttached(Attach(PROTOCOL, "worker", 50 + rank, rank, 0))) == []
    pod.member.take(WorkerReported(0, 0, WorkerReport(WorkerPhase.RUNNING, 0)), pod.now_s)
    (action,) = pod.step(WorkerReported(1, 0, WorkerReport(WorkerPhase.RUNNING, 0)))
    assert isinstance(action, SendToRendezvous)
    assert isinstance(action.message, Hello)
    assert action.message.plan == plan(0)
    assert action.message.workers == first.member.workers


def test_restarted_agent_waits_most_of_the_reconnect_time_for_its_launcher() -> None:
    pod = Pod(memory=AgentMemory(1, -1, plan(0), (0, 0)))
    assert pod.step(Connected()) == []
    assert pod.member.next_deadline_s == pytest.approx(pod.now_s + 0.6 * TIMEOUTS.reconnect_s)
    assert pod.after(0.5 * TIMEOUTS.reconnect_s) == []
    (action,) = pod.after(0.2 * TIMEOUTS.reconnect_s)
    assert isinstance(action, SendToRendezvous)


def test_restarted_agent_takes_no_slow_worker_for_a_new_one() -> None:
    first = Pod()
    first.run()
    pod = Pod(memory=AgentMemory(1, -1, plan(0), (0, 0)))
    assert pod.step(Connected(), LauncherAttached(), LauncherReported(processes(running(0), running(1)))) == []
    (action,) = pod.after(TIMEOUTS.reconnect_s)
    assert isinstance(action, SendToRendezvous)
    assert isinstance(action.message, Hello)
    assert action.message.workers == first.member.workers
    pod.hear(Welcome(PROTOCOL, 1, 60.0))
    for rank in (0, 1):
        attached = WorkerAttached(Attach(PROTOCOL, "worker", 50 + rank, rank, 0))
        assert pod.step(attached, WorkerReported(rank, 0, WorkerReport(WorkerPhase.RUNNING, 0))) == []


def test_restarted_agent_leads_a_slow_worker_out_of_an_iteration_that_is_over() -> None:
    pod = Pod(memory=AgentMemory(1, 0, plan(0), (0, 0)))
    pod.step(Connected(), LauncherAttached(), LauncherReported(processes(running(0), running(1))))
    pod.after(TIMEOUTS.reconnect_s)
    actions = pod.step(WorkerAttached(Attach(PROTOCOL, "worker", 50, 0, 0)))
    assert [a.message.iteration for a in actions if isinstance(a, SendToWorker) and isinstance(a.message, Leave)] == [0]


def test_worker_that_reconnects_is_what_it_was_until_it_speaks() -> None:
    pod = Pod()
    pod.run()
    assert pod.step(WorkerLost(0, 0), WorkerAttached(Attach(PROTOCOL, "worker", 50, 0, 0))) == []
    assert phases(pod.step(WorkerReported(0, 0, WorkerReport(WorkerPhase.COMPLETED, 0))))[0][0] is WorkerPhase.COMPLETED


@pytest.mark.parametrize("settings", [IN_PROCESS, PROCESS], ids=["in-process", "process"])
def test_plan_that_was_interrupted_before_it_was_settled_is_behind_its_workers(settings: JobSettings) -> None:
    pod = Pod(settings)
    pod.join()
    if settings is IN_PROCESS:
        pod.start_workers()
    else:
        pod.step(LauncherAttached(), LauncherReported(processes()))
    pod.member.take(RendezvousSent(plan(0)), pod.now_s)
    pod.member.take(RendezvousSent(interrupt(0)), pod.now_s)
    actions = pod.member.settle(pod.now_s)
    assert not any(isinstance(action, (SendToWorker, SendToLauncher)) for action in actions)
    assert [(phase, iteration) for phase, iteration, _ in phases(actions)] == [(WorkerPhase.READY, 0)] * 2


def test_plan_does_not_enter_processes_that_no_launcher_can_start() -> None:
    pod = Pod(PROCESS)
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes()), LauncherLost())
    pod.hear(plan(0))
    assert WorkerPhase.RUNNING not in [worker.phase for worker in pod.member.workers]


def test_process_that_was_ordered_from_a_launcher_that_ended_is_gone() -> None:
    pod = Pod(PROCESS)
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes()))
    actions = pod.hear(plan(0))
    assert len([a for a in actions if isinstance(a, SendToLauncher) and isinstance(a.message, Spawn)]) == 2
    assert phases(pod.step(LauncherLost())) == [(WorkerPhase.GONE, 0, 0)] * 2


def test_stale_stamp_is_reported_as_soft_timeout_once() -> None:
    pod = Pod()
    pod.run()
    now_ns = int(pod.now_s * 1e9)
    fresh = WorkerStamps(50, 0, now_ns, now_ns, 0, 3, FLAG_IN_FUNCTION, 0)
    stale = replace(fresh, pid=51, alive_ns=now_ns - int(11e9), main_ns=now_ns - int(11e9), step=2)
    pod.step(Ticked((fresh, stale)))
    assert [fault and fault.cause for fault in faults(pod)] == [None, Cause.SOFT_TIMEOUT]
    assert [worker.step for worker in pod.member.workers] == [3, 2]
    assert pod.step(Ticked((fresh, stale))) == []


def test_worker_that_makes_no_progress_is_asked_for_its_stack_which_then_names_the_place() -> None:
    """2.22"""
    pod = Pod()
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes(running(0), running(1))))
    for rank in (0, 1):
        attach = Attach(PROTOCOL, "worker", 50 + rank, rank, 0, 60 + rank)
        pod.step(WorkerAttached(attach), WorkerReported(rank, 0, ready(rank)))
    pod.hear(plan(0))

    def look(age_s: float, stacks: dict[int, tuple[str, ...]]) -> list[Action]:
        now_ns = int(pod.now_s * 1e9)
        fresh = WorkerStamps(50, 0, now_ns, now_ns, 0, 3, FLAG_IN_FUNCTION, 0)
        stale = replace(fresh, pid=51, alive_ns=now_ns - int(age_s * 1e9))
        return pod.step(Ticked((fresh, stale), stacks))

    assert not any(isinstance(action, SendToLauncher) for action in look(7.9, {}))
    assert SendToLauncher(DumpStack(1, 0, 61)) in look(8.1, {})
    assert pod.member.asked_for_stacks == (1,)
    assert look(9.0, {}) == []
    frames = ("train.py:80 in main", "train.py:33 in step", "/x/unbroken/inprocess/call.py:1 in ping")
    look(10.5, {1: frames})
    fault = faults(pod)[1]
    assert fault is not None
    assert fault.stack == frames
    assert fault.detail.endswith("; stands at train.py:33 in step < train.py:80 in main")


def test_stamps_of_a_former_incarnation_are_ignored() -> None:
    pod = Pod()
    pod.run()
    now_ns = int(pod.now_s * 1e9)
    old = WorkerStamps(50, 0, now_ns - int(99e9), now_ns - int(99e9), 0, 3, FLAG_IN_FUNCTION, 7)
    assert pod.step(Ticked((old, old))) == []


def test_process_that_never_attaches_is_remarked_on() -> None:
    pod = Pod()
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes(running(0), running(1))))
    assert not any(worker.fault for worker in pod.member.workers)
    pod.after(60)
    details = [fault.detail for fault in faults(pod) if fault is not None]
    assert details == ["has not attached for 60 s: does it call unbroken.inprocess.Wrapper?"] * 2


def test_end_of_the_launcher_is_the_end_of_the_pod() -> None:
    pod = Pod()
    pod.run()
    (action,) = pod.step(LauncherLost())
    assert isinstance(action, SendToRendezvous)
    assert isinstance(action.message, Report)
    assert action.message.is_leaving
    assert [worker.phase for worker in action.message.workers] == [WorkerPhase.GONE] * 2


def test_sigterm_is_told_and_the_agent_ends_with_the_launcher() -> None:
    pod = Pod()
    pod.run()
    (action,) = pod.step(Terminated())
    assert isinstance(action, SendToRendezvous)
    assert isinstance(action.message, Report)
    assert action.message.is_leaving
    assert Exit(0) in pod.member.step(LauncherLost(), pod.now_s)


def test_sigterm_ends_an_agent_without_a_launcher_at_once() -> None:
    assert Exit(0) in Pod().member.step(Terminated(), 1000.0)


@pytest.mark.parametrize(("outcome", "code", "grace_s"), [(JobPhase.COMPLETE, 0, 600.0), (JobPhase.FAILED, 1, 5.0)])
def test_finish_releases_workers_and_shuts_the_launcher_down(outcome: JobPhase, code: int, grace_s: float) -> None:
    """3.29"""
    pod = Pod()
    pod.run()
    finish = Finish(1, outcome, Reason.COMPLETED, "over")
    releases = [SendToWorker(rank, Release(outcome, "over")) for rank in (0, 1)]
    assert pod.hear(finish) == [*releases, SendToLauncher(Shutdown(code, grace_s, "over", (0, 1)))]
    assert pod.hear(finish) == []
    pod.step(LauncherReported(processes(ended(0, 0), ended(1, 0))))
    assert faults(pod) == [None, None]
    assert Exit(0) in pod.member.step(LauncherLost(), pod.now_s)


def test_ends_after_the_training_are_reported_as_they_are() -> None:
    pod = Pod()
    pod.run()
    for rank in (0, 1):
        pod.step(WorkerReported(rank, 0, WorkerReport(WorkerPhase.COMPLETED, 0)))
    pod.hear(Finish(1, JobPhase.COMPLETE, Reason.COMPLETED, "over"))
    assert [state.has_ended for state in pod.member.workers] == [False, False]
    pod.step(LauncherReported(processes(ended(0, 0), ended(1, 3, error="ValueError: disk full"))))
    first, second = pod.member.workers
    assert (first.phase, first.has_ended, first.fault) == (WorkerPhase.COMPLETED, True, None)
    detail = "exited with code 3 after its training function had returned: ValueError: disk full"
    assert (second.phase, second.has_ended) == (WorkerPhase.GONE, False)
    assert second.fault == Fault(Cause.PROCESS_EXIT, 0, detail, exit_code=3)


@pytest.mark.parametrize("others", [(), (RankPlan(1, None, RankReason.FIRST),)], ids=["no part", "no rank"])
def test_worker_that_was_killed_before_others_completed_is_not_said_to_have_returned(
    others: tuple[RankPlan, ...],
) -> None:
    """The job went on without it."""
    pod = Pod()
    pod.run()
    pod.step(LauncherReported(processes(running(0), ended(1, -9))))
    pod.hear(interrupt(0))
    pod.step(WorkerReported(0, 0, ready(0, 0)))
    pod.hear(replace(plan(1), ranks=(*plan(1).ranks[:1], *others)))
    pod.step(WorkerReported(0, 0, WorkerReport(WorkerPhase.COMPLETED, 1)))
    pod.hear(Finish(1, JobPhase.COMPLETE, Reason.COMPLETED, "over"))
    pod.step(LauncherReported(processes(ended(0, 0), ended(1, -9))))
    first, second = pod.member.workers
    assert (first.phase, first.has_ended, first.fault) == (WorkerPhase.COMPLETED, True, None)
    assert (second.phase, second.has_ended, second.fault) == (WorkerPhase.GONE, False, None)


def test_worker_whose_exit_code_only_its_launcher_knows_counts_as_ended_well() -> None:
    """Where the wrapper has started the agent, processes go on after their call, and torchrun sees their codes."""
    pod = Pod()
    pod.run()
    for rank in (0, 1):
        pod.step(WorkerReported(rank, 0, WorkerReport(WorkerPhase.COMPLETED, 0)))
    pod.hear(Finish(1, JobPhase.COMPLETE, Reason.COMPLETED, "over"))
    pod.step(LauncherReported(processes(*(ended(rank, UNKNOWN_EXIT, error="left") for rank in (0, 1)))))
    assert [(state.has_ended, state.fault) for state in pod.member.workers] == [(True, None)] * 2


# ---------------------------------------------------------------------------------------------- process restarts


def started_process_pod() -> Pod:
    """Return a pod of a job with process restarts, in iteration 0."""
    pod = Pod(PROCESS)
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes()))
    pod.hear(plan(0))
    pod.step(LauncherReported(processes(running(0), running(1))))
    return pod


def test_place_without_a_process_is_ready_with_its_held_port() -> None:
    pod = Pod(PROCESS)
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes()))
    expected = [WorkerState(rank, 0, WorkerPhase.READY, -1, "127.0.0.9", 700 + rank) for rank in (0, 1)]
    assert list(pod.member.workers) == expected


def test_plan_becomes_processes_with_torchrun_variables() -> None:
    """1.15"""
    pod = Pod(PROCESS)
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes()))
    actions = pod.hear(plan(0))
    spawns = [a.message for a in actions if isinstance(a, SendToLauncher) and isinstance(a.message, Spawn)]
    assert [(spawn.local_rank, spawn.incarnation) for spawn in spawns] == [(0, 0), (1, 0)]
    assert spawns[1].environment == {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "4",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.9",
        "MASTER_PORT": "600",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(2**31 - 1),
        "TORCHELASTIC_RUN_ID": "digits",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "UNBROKEN_TERM": "1",
        "UNBROKEN_IN_PROCESS": "0",
    }
    assert phases(pod.after(0.06)) == [(WorkerPhase.RUNNING, 0, 0)] * 2


def test_spare_of_a_process_job_starts_nothing() -> None:
    pod = Pod(PROCESS)
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes()))
    assert pod.hear(plan(0, role=Role.SPARE)) == []


def test_interruption_ends_processes_and_their_places_become_ready_by_themselves() -> None:
    pod = started_process_pod()
    ends = [SendToLauncher(End(rank, 0, 5)) for rank in (0, 1)]
    assert [a for a in pod.hear(interrupt(0)) if isinstance(a, SendToLauncher)] == ends
    actions = pod.step(LauncherReported(processes(ended(0, -15), ended(1, 1))))
    assert phases(actions) == [(WorkerPhase.READY, 0, 1)] * 2
    assert [worker.port for worker in pod.member.workers] == [800, 801]
    spawned = [a.message for a in pod.hear(plan(1)) if isinstance(a, SendToLauncher)]
    assert [(s.local_rank, s.incarnation) for s in spawned if isinstance(s, Spawn)] == [(0, 1), (1, 1)]


def test_exit_code_0_is_completion_and_another_one_a_fault() -> None:
    pod = started_process_pod()
    actions = pod.step(LauncherReported(processes(ended(0, 0), ended(1, 2, error="x"))))
    assert phases(actions) == [(WorkerPhase.COMPLETED, 0, 0), (WorkerPhase.GONE, 0, 0)]
    assert faults(pod)[1] == Fault(Cause.PROCESS_EXIT, 0, "exited with code 2: x", exit_code=2)
    actions = pod.hear(interrupt(0))
    assert phases(actions) == [(WorkerPhase.READY, 0, 1), (WorkerPhase.GONE, 0, 0)]
    actions = pod.hear(Respawn(1, ((1, 0),), Cause.PROCESS_EXIT))
    assert phases(actions) == [(WorkerPhase.READY, 0, 1), (WorkerPhase.READY, 0, 1)]


def test_restarted_agent_of_a_process_job_knows_the_iteration_of_its_processes() -> None:
    pod = Pod(PROCESS, AgentMemory(1, -1, plan(4), (2, 2)))
    pod.step(Connected(), LauncherAttached())
    (action,) = pod.step(LauncherReported(processes(running(0, 2), running(1, 2))))
    assert isinstance(action, SendToRendezvous)
    assert isinstance(action.message, Hello)
    states = [(w.phase, w.iteration, w.incarnation) for w in action.message.workers]
    assert states == [(WorkerPhase.RUNNING, 4, 2)] * 2


@pytest.mark.parametrize(
    ("term", "over", "confirmed", "num_entered"),
    [
        pytest.param(1, -1, None, 2, id="still in force"),
        pytest.param(1, 0, None, 0, id="over meanwhile"),
        pytest.param(2, -1, None, 2, id="the newest that another coordinator knows"),
        pytest.param(2, 4, None, 0, id="older than what another coordinator knows"),
        pytest.param(1, 0, 1, 2, id="replaced"),
    ],
)
def test_restarted_agent_enters_late_workers_only_when_it_knows_that_the_plan_holds(
    term: int, over: int, confirmed: int | None, num_entered: int
) -> None:
    """The others may be in the next iteration by now; a pod that holds all ranks would save beside them."""
    pod = Pod(IN_PROCESS, AgentMemory(1, -1, plan(0), (0, 0)))
    pod.step(Connected(), LauncherAttached(), LauncherReported(processes(running(0), running(1))))
    assert phases(pod.after(30)) == [(WorkerPhase.RUNNING, 0, 0)] * 2, "a slow worker is taken for one that is in it"
    actions = pod.hear(Welcome(PROTOCOL, term, 5.0, over))
    if confirmed is not None:
        actions += pod.hear(plan(confirmed, term))
    for rank in (0, 1):
        actions += pod.step(WorkerAttached(Attach(PROTOCOL, "worker", 50 + rank, rank, 0)))
        actions += pod.step(WorkerReported(rank, 0, ready(rank)))
    assert entered(actions) == [confirmed or 0] * num_entered


@pytest.mark.parametrize("settings", [IN_PROCESS, PROCESS], ids=["in-process", "process"])
@pytest.mark.parametrize("is_restarted", [False, True], ids=["its connection broke", "its agent was restarted"])
def test_worker_that_a_hello_tells_outside_of_a_plan_is_not_let_into_it_any_more(
    settings: JobSettings, is_restarted: bool
) -> None:
    """The rendezvous may have cut the next plan for it by then, and count on the end of the world before."""
    pod = Pod(settings, AgentMemory(1, -1, plan(0), (0, 0)) if is_restarted else None)
    if settings is IN_PROCESS:
        pod.start_workers()
    else:
        pod.step(LauncherAttached(), LauncherReported(processes()))
    if not is_restarted:
        pod.join()
        for event in (RendezvousSent(plan(0)), Disconnected()):
            pod.member.take(event, pod.now_s)
    told = phases(pod.step(Connected()))
    assert [(phase, iteration) for phase, iteration, _ in told] == [(WorkerPhase.READY, -1)] * 2
    assert entered(pod.hear(Welcome(PROTOCOL, 2, 5.0, -1))) == []
    assert entered(pod.hear(plan(1, 2))) == [1, 1]


def test_worker_that_gets_ready_while_nobody_is_heard_waits_for_the_next_plan() -> None:
    pod = Pod()
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes(running(0), running(1))))
    for rank in (0, 1):
        pod.step(WorkerAttached(Attach(PROTOCOL, "worker", 50 + rank, rank, 0)))
    pod.hear(plan(0))
    pod.step(Disconnected())
    assert entered(pod.step(WorkerReported(0, 0, ready(0)))) == []
    assert entered(pod.join()) == []
    assert entered(pod.hear(plan(1))) == [1]


def test_a_welcome_before_hello_accepts_nobody() -> None:
    """It raised ValueError, and with it the agent ended."""
    pod = Pod(memory=AgentMemory(1, -1, plan(0), (0, 0)))
    pod.step(Connected())
    (hang_up,) = pod.hear(Welcome(PROTOCOL, 1, 5.0))
    assert hang_up == CloseConnection("Welcome: want it as the answer to Hello, got it before", 5.0)
    pod.step(Disconnected())
    assert not pod.member.is_accepted
    pod.start_workers()
    assert [type(action.message) for action in pod.join() if isinstance(action, SendToRendezvous)] == [Hello]
    assert pod.member.is_accepted


def test_a_plan_of_the_same_iteration_that_takes_a_rank_away_starts_no_process_there() -> None:
    """The agent ended, looking for the rank of its worker."""
    pod = Pod(PROCESS)
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes()))
    pod.hear(plan(0))
    pod.hear(replace(plan(0, term=2), ranks=tuple(replace(part, rank=None) for part in plan(0).ranks)))
    # A launcher that attaches again is told again what to start.
    actions = pod.step(LauncherAttached(), LauncherReported(processes()))
    assert [action for action in actions if isinstance(action, SendToLauncher)] == []


@pytest.mark.parametrize(
    ("report", "why"),
    [
        pytest.param(WorkerReport(WorkerPhase.READY, 1), "WorkerReport.iteration: want -1 to 0, got 1", id="iteration"),
        pytest.param(
            WorkerReport(WorkerPhase.STOPPING, 0, fault=Fault(Cause.EXCEPTION, 9)),
            "WorkerReport.fault.iteration: want -1 to 0, got 9",
            id="fault",
        ),
        pytest.param(WorkerReport(WorkerPhase.RUNNING, 0), None, id="as it was told"),
    ],
)
def test_a_worker_is_in_no_iteration_that_its_pod_was_not_told(report: WorkerReport, why: str | None) -> None:
    pod = Pod()
    pod.run()
    assert pod.member.check_report(report) == why


def test_a_worker_that_knows_more_than_an_agent_without_memory_is_believed() -> None:
    pod = Pod()
    assert pod.member.check_report(WorkerReport(WorkerPhase.RUNNING, 900)) is None
    why = "WorkerReport.iteration: want -1 to 2147483647, got 2147483648"
    assert pod.member.check_report(WorkerReport(WorkerPhase.RUNNING, 1 << 31)) == why
