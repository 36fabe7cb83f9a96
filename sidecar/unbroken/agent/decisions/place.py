"""One place of a pod: what is known about its process and worker, and the one phase that follows from it. Pure."""

import operator
import signal
from dataclasses import dataclass, replace

from unbroken_core.messages import Consult, Fault, Halt, RankPlan, WorkerState
from unbroken_core.pod.pod_messages import UNKNOWN_EXIT, Enter, ProcessState, WorkerReport
from unbroken_core.reasons import Cause, WorkerPhase

_LEAVES_ANYWAY = (Cause.BASE_EXCEPTION, Cause.UNHEALTHY)
"""After these the worker's process ends by itself: its own word says more than the exit code."""

MAX_DETAIL = 2000
_UNTOLD = -1.0


@dataclass
class Place:
    """Facts about one local rank. All but `wanted` belong to the incarnation `wanted`."""

    local_rank: int
    wanted: int = 0
    """Incarnation that is, or is to be, at this place."""
    process: ProcessState | None = None
    """Newest that the launcher reported; its incarnation may be older than `wanted`."""
    worker: WorkerReport | None = None
    """The worker's word on the connection that is open; None until it spoke there."""
    former: WorkerReport | None = None
    """What was known of it before: its word on the connection before, or what the agent before this one told it."""
    is_attached: bool = False
    part: RankPlan | None = None
    """Its part of the newest plan; None when the plan was made for another incarnation or without this place."""
    told: Enter | None = None
    entered: int = -1
    """Last iteration for which a process was started here (jobs without in-process restarts)."""
    passed: int = -1
    """Highest iteration that the worker was told to enter on this connection."""
    left: int = -1
    """Highest iteration that it was told to leave on this connection."""
    warned: float | None = _UNTOLD
    """Since when the rendezvous is not heard, as the worker was told on this connection; None: it is heard."""
    is_passed_over: bool = False
    """Whether a Hello told that it is not in the newest plan: the rendezvous does not expect it there any more."""
    asked: Consult | None = None
    """The question that it was asked on this connection."""
    halt: Halt | None = None
    """The order to wait after a step that it was told on this connection."""
    is_released: bool = False
    """Whether it was told on this connection that the job is over."""
    must_be_ready_by_s: float | None = None
    found: Fault | None = None
    """The agent's own finding, as opposed to the worker's word."""
    unheard: Fault | None = None
    """The fault for which this pod has left its iteration, until the rendezvous says that it is over."""
    spawned: int = -1
    """Incarnation that the attached launcher was told to start."""
    ended: int = -1
    """Incarnation that the attached launcher was told to end."""
    step: int = -1
    stack_signal: int = 0
    """Signal at which the attached worker writes its stack; 0: none."""
    stack_wanted: int = -1
    """Iteration in which the worker came near to the soft timeout."""
    stack_asked: int = -1
    """Last iteration for which the attached launcher was asked for the stack."""
    stack: tuple[str, ...] = ()
    """What came of it, innermost last."""
    is_ending: bool = False
    """Whether its main thread has ended; the launcher will find out what that means."""
    inspected: int = -1
    """Incarnation of which the attached launcher was asked how it ends."""
    checks: tuple[tuple[str, bool], ...] = ()
    """Health checks that were run here last, and whether they passed: a failure stays until another process passes."""
    alive_since_s: float | None = None
    """When its process was first seen; None before, and once its library attached."""
    known: tuple[tuple[object, ...], WorkerState] | None = None
    """The last state that was asked for, and the facts that it followed from."""

    @property
    def present(self) -> ProcessState | None:
        """The process of the wanted incarnation; None before it is started."""
        return self.process if self.process is not None and self.process.incarnation == self.wanted else None

    @property
    def is_alive(self) -> bool:
        """Whether any process, of this or an older incarnation, runs here."""
        return self.process is not None and self.process.pid > 0 and self.process.exit_code is None

    def advance(self, incarnation: int) -> None:
        """Make room for a new process: nothing that was known about the old one holds."""
        self.wanted = incarnation
        self.worker = self.former = self.part = self.told = self.found = self.must_be_ready_by_s = None
        self.is_attached = self.is_released = self.is_ending = self.is_passed_over = False
        self.alive_since_s = self.asked = self.unheard = self.halt = None
        self.left = self.passed = self.step = -1
        self.warned = _UNTOLD
        self.stack_signal, self.stack_wanted, self.stack_asked, self.stack = 0, -1, -1, ()

    def attach(self, stack_signal: int = 0) -> None:
        """A worker connected (again): it forgot nothing, but what was sent on the old connection may be lost."""
        self.stack_signal = stack_signal
        self.is_attached = True
        self.is_released = False
        self.alive_since_s = None
        self.former, self.worker = self.worker or self.former, None
        self.asked = self.halt = None
        self.left = self.passed = -1
        self.warned = _UNTOLD

    def lose_launcher(self) -> None:
        """Note that a process ended with the launcher; also one that was ordered and never reported."""
        ended = self.process
        if self.told is not None and self.present is None:
            ended = ProcessState(self.local_rank, self.wanted, 0)
        if ended is not None and ended.exit_code is None:
            self.process = replace(ended, exit_code=-9, error="the pod's launcher ended")

    def hear(self, report: WorkerReport) -> None:
        """Take the worker's word."""
        self.worker = report
        self.checks = report.checks or self.checks
        if report.phase is WorkerPhase.READY:
            self.must_be_ready_by_s = None
            self.found = None


def in_process_state(place: Place, is_finished: bool) -> WorkerState:
    """Return the worker's state in a job with in-process restarts; the same object until another fact is known."""
    # Asked for several times at each message of each worker: a pod of 16 has little else to do in a recovery.
    facts = (
        place.wanted,
        place.process,
        place.worker or place.former,
        place.told,
        place.found,
        place.unheard,
        place.step,
        is_finished,
    )
    known = place.known
    if known is not None and all(map(operator.is_, known[0], facts)):
        return known[1]
    state = _in_process_state(place, is_finished)
    place.known = facts, state
    return state


def _in_process_state(place: Place, is_finished: bool) -> WorkerState:
    process, worker = place.present, place.worker or place.former
    if process is not None and process.exit_code is not None:
        return _exited(place, process, worker, is_finished)
    if worker is None:
        return WorkerState(place.local_rank, place.wanted, WorkerPhase.STARTING, fault=place.found)
    iteration, phase = worker.iteration, worker.phase
    if place.told is not None and place.told.iteration > iteration:
        iteration = place.told.iteration
        # From the moment that it was told it is no longer waiting at its endpoint, whatever it said before.
        phase = WorkerPhase.RUNNING if place.told.rank is not None and phase is WorkerPhase.READY else phase
    is_ready = phase is WorkerPhase.READY
    return WorkerState(
        place.local_rank,
        place.wanted,
        phase,
        iteration,
        worker.host if is_ready else "",
        worker.port if is_ready else 0,
        _stronger(worker.fault or place.unheard, place.found),
        place.step,
        worker.has_progress,
        worker.policy,
        worker.keys,
        worker.answer if is_ready else None,
        worker.halted if phase is WorkerPhase.RUNNING else None,
    )


def process_state(place: Place, host: str, is_finished: bool) -> WorkerState:
    """Return the worker's state in a job whose processes are restarted: READY means that a port is held for it."""
    process = place.present
    if process is None:
        return _unstarted(place, host)
    if process.exit_code is None:
        return _running(place)
    if process.exit_code == 0:
        return WorkerState(
            place.local_rank, place.wanted, WorkerPhase.COMPLETED, place.entered, fault=None, step=place.step
        )
    return _exited(place, process, place.worker, is_finished, place.entered)


def _unstarted(place: Place, host: str) -> WorkerState:
    """No process of the wanted incarnation: READY once a port is held and the one before it has ended."""
    port = 0 if place.process is None else place.process.port
    if place.told is not None:
        return WorkerState(place.local_rank, place.wanted, WorkerPhase.RUNNING, place.entered)
    if port == 0 or place.is_alive:
        return WorkerState(place.local_rank, place.wanted, WorkerPhase.STARTING, place.entered)
    return WorkerState(place.local_rank, place.wanted, WorkerPhase.READY, place.entered, host, port)


def _running(place: Place) -> WorkerState:
    worker = place.worker
    phase = WorkerPhase.RUNNING
    if place.ended >= place.wanted:
        phase = WorkerPhase.STOPPING
    elif worker is not None and worker.phase in (WorkerPhase.STOPPING, WorkerPhase.COMPLETED):
        phase = worker.phase
    fault = _stronger(worker.fault if worker else None, place.found)
    has_progress = worker is not None and worker.has_progress
    return WorkerState(
        place.local_rank,
        place.wanted,
        phase,
        place.entered,
        fault=fault,
        step=place.step,
        has_progress=has_progress,
    )


def _exited(
    place: Place, process: ProcessState, worker: WorkerReport | None, is_finished: bool, entered: int = -1
) -> WorkerState:
    iteration = max(entered, worker.iteration if worker else -1, place.told.iteration if place.told else -1)
    if worker is not None and worker.phase is WorkerPhase.COMPLETED and process.exit_code == 0:
        return WorkerState(place.local_rank, place.wanted, WorkerPhase.COMPLETED, iteration, step=place.step)
    fault = None if is_finished else _exit_fault(place, process, worker, iteration)
    return WorkerState(place.local_rank, place.wanted, WorkerPhase.GONE, iteration, fault=fault, step=place.step)


def _exit_fault(place: Place, process: ProcessState, worker: WorkerReport | None, iteration: int) -> Fault:
    own = worker.fault if worker is not None else None
    code = process.exit_code or 0
    exit_code = code if code > 0 and code != UNKNOWN_EXIT else None
    if own is not None and own.cause in _LEAVES_ANYWAY and own.iteration == iteration:
        return replace(own, exit_code=exit_code)
    if place.found is not None:
        return place.found
    cause = Cause.PROCESS_SIGNAL if code < 0 else Cause.PROCESS_EXIT
    return Fault(cause, iteration, describe_exit(code, process.error)[:MAX_DETAIL], exit_code=exit_code)


def describe_exit(code: int, error: str) -> str:
    """Return one line about the end of a process; a negative code is a signal's number."""
    if code == UNKNOWN_EXIT:
        return error or "ended; only its parent knows the exit code"
    if code == 0:
        return "exited with code 0 before it completed (does the script call unbroken.inprocess.Wrapper?)"
    ending = f"killed by signal {-code} ({_signal_name(-code)})" if code < 0 else f"exited with code {code}"
    return f"{ending}: {error}" if error else ending


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _stronger(first: Fault | None, second: Fault | None) -> Fault | None:
    if first is None or second is None:
        return first or second
    return first if first.cause.severity >= second.cause.severity else second
