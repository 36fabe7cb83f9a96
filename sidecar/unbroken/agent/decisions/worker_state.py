"""The state of each worker, as it follows from what is known at its place. Pure."""

import operator
import signal
from collections.abc import Sequence
from dataclasses import replace

from unbroken.agent.decisions.instructions import Instructions
from unbroken.agent.decisions.place import LocalPlace
from unbroken_core.pod.pod_messages import UNKNOWN_EXIT, ProcessState, WorkerReport
from unbroken_core.protocol.messages import Fault, WorkerState
from unbroken_core.vocabulary.reasons import Cause, JobPhase, WorkerPhase

_LEAVES_ANYWAY = (Cause.BASE_EXCEPTION, Cause.STALE_STATE, Cause.UNHEALTHY)
"""After these the process ends by itself: the worker's own report says more than the exit code."""

MAX_DETAIL = 2000


def worker_states(
    places: Sequence[LocalPlace], instructions: Instructions, is_in_process: bool, host: str
) -> tuple[WorkerState, ...]:
    """Return the state of each worker, in local order; `host` is the address at which this pod's ports are reached."""
    outcome = None if instructions.finish is None else instructions.finish.outcome
    if is_in_process:
        states = [in_process_state(place, outcome) for place in places]
    else:
        states = [process_state(place, host, outcome) for place in places]
    if outcome is None:
        states = [_stopping_job(place, state) for place, state in zip(places, states, strict=True)]
    return tuple(_past_plan(place, state, instructions) for place, state in zip(places, states, strict=True))


def _stopping_job(place: LocalPlace, state: WorkerState) -> WorkerState:
    """Repeat the fault that ends the job, whatever the worker or its successor has done since.

    A newer fault is told instead: the rendezvous that knew of this one has gone on without it.
    """
    stop, fault = place.stop, state.fault
    if stop is None or (fault is not None and (fault.rule == stop.rule or fault.iteration > stop.iteration)):
        return state
    return replace(state, fault=stop)


def _past_plan(place: LocalPlace, state: WorkerState, instructions: Instructions) -> WorkerState:
    """Count a plan as passed for a worker that was never ordered to enter it before it was interrupted."""
    plan = instructions.plan
    if plan is None or place.incarnation.part is None or plan.iteration > instructions.interrupted:
        return state
    if state.phase is not WorkerPhase.READY or state.iteration >= plan.iteration:
        return state
    return replace(state, iteration=plan.iteration)


def in_process_state(place: LocalPlace, outcome: JobPhase | None) -> WorkerState:
    """Return the worker's state in a job with in-process restarts; the same object until a fact changes.

    `outcome` is what this pod was told of the job's end; None before.
    """
    # Needed several times for each message of each worker: in a pod of 16, a recovery is little else.
    facts = (place.incarnation, place.connection, place.process, outcome)
    known = place.known
    if known is not None and all(map(operator.is_, known[0], facts)):
        return known[1]
    state = _in_process_state(place, outcome)
    place.known = facts, state
    return state


def _in_process_state(place: LocalPlace, outcome: JobPhase | None) -> WorkerState:
    process, report, incarnation = place.present, place.report, place.incarnation
    if process is not None and process.exit_code is not None:
        return _exited(place, process, report, outcome)
    if report is None:
        return WorkerState(place.local_rank, incarnation.number, WorkerPhase.STARTING, fault=incarnation.found)
    iteration, phase, entry = report.iteration, report.phase, incarnation.entry
    if entry is not None and entry.iteration > iteration:
        iteration = entry.iteration
        # Once ordered to enter it no longer waits at its endpoint, whatever it reported before.
        phase = WorkerPhase.RUNNING if entry.rank is not None and phase is WorkerPhase.READY else phase
    if incarnation.is_ending and incarnation.found is not None and incarnation.found.cause is Cause.HARD_TIMEOUT:
        # It does not come back, however long the launcher says nothing: nobody needs to wait for it to leave.
        phase = WorkerPhase.GONE
    is_ready = phase is WorkerPhase.READY
    return WorkerState(
        place.local_rank,
        incarnation.number,
        phase,
        iteration,
        report.host if is_ready else "",
        report.port if is_ready else 0,
        _fault_of(report.fault or incarnation.unconfirmed, incarnation.found, iteration),
        incarnation.step,
        report.has_progress,
        report.policy,
        report.keys,
        report.answer if is_ready else None,
        report.halted if phase is WorkerPhase.RUNNING else None,
        activity=incarnation.activity,
    )


def process_state(place: LocalPlace, host: str, outcome: JobPhase | None) -> WorkerState:
    """Return the worker's state in a job whose processes are restarted: READY means that a port is held for it."""
    process, incarnation = place.present, place.incarnation
    if process is None:
        return _unstarted(place, host)
    if process.exit_code is None:
        return _running(place)
    if process.exit_code == 0:
        number, step = incarnation.number, incarnation.step
        return WorkerState(place.local_rank, number, WorkerPhase.COMPLETED, place.entered, step=step, has_ended=True)
    return _exited(place, process, place.connection.report, outcome, place.entered)


def _unstarted(place: LocalPlace, host: str) -> WorkerState:
    """No process of the wanted incarnation: READY once a port is held and the one before it has ended."""
    number, port = place.incarnation.number, 0 if place.process is None else place.process.port
    if place.incarnation.entry is not None:
        return WorkerState(place.local_rank, number, WorkerPhase.RUNNING, place.entered)
    if port == 0 or place.is_alive:
        return WorkerState(place.local_rank, number, WorkerPhase.STARTING, place.entered)
    return WorkerState(place.local_rank, number, WorkerPhase.READY, place.entered, host, port)


def _running(place: LocalPlace) -> WorkerState:
    incarnation, report = place.incarnation, place.connection.report
    phase = WorkerPhase.RUNNING
    if place.orders.ended >= incarnation.number:
        phase = WorkerPhase.STOPPING
    elif report is not None and report.phase in (WorkerPhase.STOPPING, WorkerPhase.COMPLETED):
        phase = report.phase
    return WorkerState(
        place.local_rank,
        incarnation.number,
        phase,
        place.entered,
        fault=_fault_of(report.fault if report else None, incarnation.found, place.entered),
        step=incarnation.step,
        has_progress=report is not None and report.has_progress,
        activity=incarnation.activity,
    )


def _exited(
    place: LocalPlace,
    process: ProcessState,
    report: WorkerReport | None,
    outcome: JobPhase | None,
    entered: int = -1,
) -> WorkerState:
    number, step, entry = place.incarnation.number, place.incarnation.step, place.incarnation.entry
    iteration = max(entered, report.iteration if report else -1, entry.iteration if entry else -1)
    if report is not None and report.phase is WorkerPhase.COMPLETED and process.exit_code == 0:
        has_ended = outcome is not None
        return WorkerState(place.local_rank, number, WorkerPhase.COMPLETED, iteration, step=step, has_ended=has_ended)
    # Without a rank in the newest plan it was lost before, and others have completed.
    part = place.incarnation.part
    was_rank = entry is not None and entry.rank is not None and part is not None and part.rank is not None
    if outcome is JobPhase.COMPLETE and was_rank:
        return _ended(place, process, iteration)
    fault = None if outcome is not None else _exit_fault(place.incarnation.found, process, report, iteration)
    activity = place.incarnation.activity
    return WorkerState(place.local_rank, number, WorkerPhase.GONE, iteration, fault=fault, step=step, activity=activity)


def _ended(place: LocalPlace, process: ProcessState, iteration: int) -> WorkerState:
    """Return the state of a rank whose process has ended once the training function had returned on all ranks."""
    number, step, code = place.incarnation.number, place.incarnation.step, process.exit_code or 0
    if code in (0, UNKNOWN_EXIT):
        # Unknown where the wrapper itself has started the agent: the process and its code are its launcher's affair.
        return WorkerState(place.local_rank, number, WorkerPhase.COMPLETED, iteration, step=step, has_ended=True)
    cause = Cause.PROCESS_SIGNAL if code < 0 else Cause.PROCESS_EXIT
    ending = f"{describe_exit(code, '')} after its training function had returned"
    detail = f"{ending}: {process.error}" if process.error else ending
    fault = Fault(cause, iteration, detail[:MAX_DETAIL], exit_code=code if code > 0 else None)
    return WorkerState(place.local_rank, number, WorkerPhase.GONE, iteration, fault=fault, step=step)


def _exit_fault(found: Fault | None, process: ProcessState, report: WorkerReport | None, iteration: int) -> Fault:
    own = report.fault if report is not None else None
    code = process.exit_code or 0
    exit_code = code if code > 0 and code != UNKNOWN_EXIT else None
    if found is not None and found.cause is Cause.LOG_RULE:
        # The line that it printed before it ended says more than the end.
        return replace(found, exit_code=exit_code)
    if own is not None and _says_why_it_leaves(own, iteration):
        return replace(own, exit_code=exit_code)
    if found is not None:
        return found
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


def _fault_of(own: Fault | None, found: Fault | None, iteration: int) -> Fault | None:
    """Return what is told of a worker that reports one fault of itself, and of which the agent has found another."""
    if own is None or found is None:
        return own or found
    if found.cause is Cause.HARD_TIMEOUT and _says_why_it_leaves(own, iteration):
        # That its process takes long to end is a consequence.
        return own
    return own if own.cause.severity >= found.cause.severity else found


def _says_why_it_leaves(own: Fault, iteration: int) -> bool:
    return own.cause in _LEAVES_ANYWAY and own.iteration == iteration
