"""One place of a pod: its process, and what has passed between its worker and the agent. Pure.

LocalPlace             lasts as long as the pod
├ Incarnation          replaced whole when another process is to take the place
├ WorkerConnection     replaced whole then, and when the worker attaches (again)
└ LauncherOrders       replaced whole when the launcher attaches (again)
"""

from dataclasses import dataclass, field, replace

from unbroken_core.pod.liveness import Ages
from unbroken_core.pod.pod_messages import Enter, MainThread, ProcessState, WorkerReport
from unbroken_core.protocol.messages import Activity, Consult, Fault, Halt, Pace, RankPlan, WorkerState
from unbroken_core.vocabulary.reasons import WorkerPhase

_NOT_SENT = -1.0


@dataclass(frozen=True)
class WorkerConnection:
    """What has passed on the newest connection of a worker; before the first it is closed."""

    is_open: bool = False
    stack_signal: int = 0
    """Signal at which the worker writes its stack; 0: none."""
    report: WorkerReport | None = None
    """The worker's newest report; None before the first on this connection."""
    entered: int = -1
    """Highest iteration that the worker was ordered to enter."""
    left: int = -1
    """Highest iteration that it was ordered to leave."""
    lost_since_s: float | None = _NOT_SENT
    """Since when there is no contact to the rendezvous, as the worker knows it; None while there is."""
    asked: Consult | None = None
    """The newest question that was passed on to it."""
    halt: Halt | None = None
    """The newest order to wait after a step that was passed on to it."""
    is_released: bool = False
    """Whether it knows that the job is over."""


@dataclass(frozen=True)
class Incarnation:
    """One process of a place, from the moment that it is wanted."""

    number: int = 0
    earlier_report: WorkerReport | None = None
    """What was known before this connection: from an earlier connection, or from an earlier agent."""
    part: RankPlan | None = None
    """Its part of the newest plan; None when the plan was made for another incarnation or without this place."""
    entry: Enter | None = None
    """The newest order to enter that this agent has decided on."""
    is_passed_over: bool = False
    """Whether a Hello reported it outside the newest plan: the rendezvous does not expect it there any more."""
    must_be_ready_by_s: float | None = None
    found: Fault | None = None
    """A fault that the agent found, as opposed to one that the worker reported."""
    unconfirmed: Fault | None = None
    """The fault for which this pod left its iteration, until the rendezvous has ended that iteration."""
    step: int = -1
    activity: Activity | None = None
    """What it did when its iteration was ended for a hang."""
    look_wanted: int = -1
    """Iteration in which its main thread seems to be blocked."""
    look_asked: int = -1
    """Last iteration for which the worker was asked where its main thread stands; -1 once that has moved on."""
    stack_wanted: int = -1
    """Iteration in which the worker came close to the soft timeout."""
    stack_asked: int = -1
    """Last iteration for which the launcher was asked for the stack."""
    stack: tuple[str, ...] = ()
    """The frames that came back, innermost last."""
    is_ending: bool = False
    """Whether its main thread has ended; the launcher will report the exit."""
    alive_since_s: float | None = None
    """When its process was first seen; None before, and once its library attached."""


@dataclass(frozen=True)
class Stamps:
    """What a worker's stamps said in its function."""

    iteration: int
    main_ns: int
    ages: Ages


@dataclass(frozen=True)
class Looked:
    """Where a main thread stood while it seemed to be blocked."""

    main_ns: int
    """Its stamp when that was asked: as long as it stays the same, the thread has not moved."""
    thread: MainThread | None = None
    """None: no answer yet."""


@dataclass(frozen=True)
class LauncherOrders:
    """The newest incarnation that the attached launcher was ordered to start, to end, and to inspect."""

    started: int = -1
    ended: int = -1
    inspected: int = -1


@dataclass
class LocalPlace:
    """One local rank."""

    local_rank: int
    incarnation: Incarnation = field(default_factory=Incarnation)
    """The process that is, or is to be, at this place."""
    connection: WorkerConnection = field(default_factory=WorkerConnection)
    """Between that process and this agent."""
    process: ProcessState | None = None
    """Newest that the launcher reported; it may be of an older incarnation."""
    orders: LauncherOrders = field(default_factory=LauncherOrders)
    entered: int = -1
    """Last iteration for which a process was started here (jobs without in-process restarts)."""
    stop: Fault | None = None
    """What ends the job by a log rule: whatever comes next, until the rendezvous has ended it."""
    checks: tuple[tuple[str, bool], ...] = ()
    """Health checks that were run here last, and whether they passed: a failure stays until another process passes."""
    checkpoint: tuple[int, int] = (-1, 0)
    """An iteration, and the nanoseconds for which the worker has stood still for checkpoints in it."""
    saved_ns: int = 0
    """Of that, what came before the newest step, as far as looks at the page tell them apart."""
    made: tuple[int, int, int] = (-1, -1, 0)
    """An iteration, its newest step, and the worker's stamp (PING) of when that was made."""
    pace: Pace | None = None
    """How busy the worker was in the newest window that it told."""
    stamps: Stamps | None = None
    """At the last look at the page; here, since it changes all the time."""
    looked: Looked | None = None
    """Where the main thread stood when it seemed to be blocked."""
    asked: Stamps | None = None
    """The stamps when its iteration was ended for a hang, until the worker has answered."""
    known: tuple[tuple[object, ...], WorkerState] | None = None
    """The last state that was asked for, and the facts that it followed from."""

    @property
    def present(self) -> ProcessState | None:
        """The process of the wanted incarnation; None before it is started."""
        process = self.process
        return process if process is not None and process.incarnation == self.incarnation.number else None

    @property
    def is_alive(self) -> bool:
        """Whether any process, of this or an older incarnation, runs here."""
        return self.process is not None and self.process.pid > 0 and self.process.exit_code is None

    @property
    def report(self) -> WorkerReport | None:
        """The newest report of the worker, from this connection or before it."""
        return self.connection.report or self.incarnation.earlier_report

    def advance(self, number: int) -> None:
        """Expect a new process: nothing known of the old one holds for it."""
        self.incarnation, self.connection = Incarnation(number), WorkerConnection()
        self.stamps = self.looked = self.asked = None

    def attach(self, stack_signal: int = 0) -> None:
        """A worker connected (again): it has forgotten nothing, but what was sent on the old connection may be lost."""
        self.incarnation = replace(self.incarnation, earlier_report=self.report, alive_since_s=None)
        self.connection = WorkerConnection(is_open=True, stack_signal=stack_signal)

    def detach(self) -> None:
        """The worker's connection closed; what passed on it still holds."""
        self.connection = replace(self.connection, is_open=False)

    def lose_launcher(self) -> None:
        """Note that the process ended with the launcher, even one that was ordered and never reported."""
        ended = self.process
        if self.incarnation.entry is not None and self.present is None:
            ended = ProcessState(self.local_rank, self.incarnation.number, 0)
        if ended is not None and ended.exit_code is None:
            self.process = replace(ended, exit_code=-9, error="the pod's launcher ended")

    def receive(self, report: WorkerReport) -> None:
        """Take the worker's report."""
        self.connection = replace(self.connection, report=report)
        self.checks = report.checks or self.checks
        if report.phase is WorkerPhase.READY:
            self.incarnation = replace(self.incarnation, must_be_ready_by_s=None, found=None)
