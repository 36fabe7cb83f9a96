"""Pure: jobs, faults and times in plain text. Lines come without colour; `paint` adds it for a terminal."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from unbroken_cli.advice import MIN_FAULTS_OF_A_STORM, fault_steps, next_steps, recent_faults
from unbroken_cli.job import FaultSummary, JobRecord, moment
from unbroken_core.recovery.account import ratios_text, shares_text
from unbroken_core.recovery.fault_words import other_texts, rest_text, takers_text
from unbroken_core.vocabulary.alert_thresholds import STORM_S
from unbroken_core.vocabulary.reasons import Cause

PHASES = ("detect", "stop", "plan", "enter", "first-progress")
_LABEL_WIDTH = 13
UNWATCHED = "whether an operator keeps this up to date cannot be seen: it was started without --lease"
_WITHOUT_RANKS = ("Suspended", "Complete", "Failed")
_SEEN_BY = {
    "capacity-returned": "the rendezvous: pods were ready for ranks that were missing",
    "exception": "the library in the worker",
    "base-exception": "the library in the worker; that worker left",
    "stale-state": "the library in the worker: torch held something of its previous rank; it got a new process",
    "log-rule": "the agent, by a log rule: what the worker printed, or did not print",
    "soft-timeout": "the agent, from the worker's stamps: no progress",
    "hard-timeout": "the agent, from the worker's stamps: no progress; the process was ended",
    "unhealthy": "a health check",
    "process-exit": "the launcher: the process ended",
    "process-signal": "the launcher: a signal ended the process",
    "straggler": "the coordinator, by how busy all ranks say that they are",
    "device-fault": "the pod's watch: a GPU or a link is broken",
    "pod-leaving": "agent or operator: the pod was being deleted",
    "pod-lost": "the rendezvous: the pod's connection broke and did not come back",
    "heartbeat-lost": "the rendezvous: the pod fell silent",
    "node-lost": "the operator: the node was NotReady or gone",
}


def status_lines(job: JobRecord, now: datetime) -> list[str]:
    """Return whether it trains, what happened last, who it was, what was done, and what to do, in this order."""
    last = job.faults[-1] if job.faults else None
    lines = [f"{job.title}: {headline(job)}"]
    if job.stale or job.deleting:
        lines += _row("it said", _said_before(job))
    if job.unwatched and not (job.stale or job.deleting):
        lines += _row("as of", f"{age(job.unwatched, now)} ({job.unwatched}): {UNWATCHED}")
    admitted = job.condition("Admitted")
    if admitted is not None and admitted.reason == "InvalidSpec" and job.state != "Invalid":
        lines += _row("spec", f"refused: {admitted.message}")
    lines += _row("ranks", _ranks(job, now))
    lines += _row("time", time_text(job, now)) if job.time is not None else []
    if job.memory:
        lines += _row("memory", job.memory)
    nodes = job.condition("NodesHealthy")
    # What nobody could look at is said too, and why ranks stay where something was found.
    lines += [] if nodes is None or job.state == "Complete" else _row("nodes", nodes.message)
    if last is None:
        lines += _row("last fault", _no_fault(job))
    else:
        lines += _row("last fault", f"{_when(last.started_at, now)}: {_what(last)}   (number {last.id})")
        lines += _row("culprit", culprit(last))
        lines += _also(last)
        lines += _row("done", done(last, job))
    return lines + _steps(next_steps(job, now))


def _no_fault(job: JobRecord) -> str:
    has_failed = job.state == "Failed" and job.reason not in ("DeadlineExceeded", "")
    none = "none recovered: the job failed as said above" if has_failed else "none"
    return f"{none} that is known: {job.forgotten}" if job.forgotten else none


def _said_before(job: JobRecord) -> str:
    # That it is being deleted says the first line; its condition is of before.
    words = ["" if job.state == "Deleting" else job.state, job.message]
    return ": ".join(filter(None, words)) or "nothing"


def doubt(job: JobRecord) -> str:
    """Return why what is written of it may not be true by now; "" when nothing says so."""
    if job.deleting:
        return f"BEING DELETED {job.deleting}"
    return f"UNKNOWN: {job.stale}" if job.stale and job.state not in ("Complete", "Failed") else ""


def headline(job: JobRecord) -> str:
    """Return whether it trains, as the first words of everything."""
    if why := doubt(job):
        return f"{why}. What follows was written before"
    because = f": {job.message}" if job.message else ""
    if job.is_training:
        return f"TRAINING{' when this was written' if job.unwatched else ''}, iteration {job.iteration}{because}"
    if job.is_training is None:
        return f"UNKNOWN{because}"
    if job.state == "Running" and job.reason == "ProcessesEnding":
        return f"TRAINING IS OVER, its processes end{because}"
    first = {
        "": "NOT TRAINING: no operator has looked at it yet",
        "Invalid": "NOT TRAINING, the spec is refused",
        "Suspended": "NOT TRAINING, suspended",
        "Forming": "NOT TRAINING YET",
        "Recovering": "NOT TRAINING, it recovers",
        "Complete": "COMPLETE",
        "Failed": "FAILED",
    }.get(job.state, f"NOT TRAINING, state {job.state}")
    return f"{first}{because}"


def faultless_lines(job: JobRecord, now: datetime) -> list[str]:
    """Return what there is to say of a job without a fault."""
    said = _row("it said", _said_before(job)) if job.stale or job.deleting else []
    lines = [f"{job.title}: {headline(job)}", *said, *_row("last fault", _no_fault(job)), *_broken_nodes(job)]
    return lines + _steps(next_steps(job, now))


def why_lines(job: JobRecord, fault: FaultSummary, now: datetime) -> list[str]:
    """Return everything about one fault."""
    lines = [f"fault {fault.id} of {job.title}: {_what(fault)}"]
    lines += _row("when", _when(fault.started_at, now))
    lines += _row("culprit", culprit(fault))
    by_rule = fault.detail.startswith("log rule ")
    seen_by = _SEEN_BY["log-rule"] if by_rule else _SEEN_BY.get(fault.cause, "unknown to this release")
    lines += _row("seen by", seen_by)
    if not fault.detail:
        from_events = "not kept: Events hold it, and the API server forgets them after an hour or so"
        lines += _row("detail", from_events if job.namespace else "none was told")
    if fault.stack:
        lines += _row("stack", "\n".join(fault.stack))
    lines += _also(fault)
    # What was found, and what nobody could look at: that nothing else was found there says nothing.
    is_of_device = fault.cause == "device-fault"
    lines += _row("nodes", _message_of(job, "NodesHealthy")) if is_of_device else _broken_nodes(job)
    if fault.cause == "straggler":
        lines += _row("pace", _message_of(job, "Straggling"))
    lines += _row("done", done(fault, job))
    for phase, seconds in phases_of(fault):
        lines += _row("", f"{phase:<15} {seconds:9.3f} s")
    is_last = bool(job.faults) and fault is job.faults[-1]
    steps = list(dict.fromkeys([*fault_steps(job, fault), *(next_steps(job, now) if is_last else ())]))
    return lines + _steps([step for step in steps if step != "nothing"] or ["nothing"])


def _broken_nodes(job: JobRecord) -> list[str]:
    """Return what is broken now, where something is: it may be why what happened did, and what comes next."""
    found = job.condition("NodesHealthy")
    return [] if found is None or found.status != "False" else _row("nodes", found.message)


def _message_of(job: JobRecord, kind: str) -> str:
    found = job.condition(kind)
    return f"nobody knows: there is no condition {kind}" if found is None else found.message


def phases_of(fault: FaultSummary) -> list[tuple[str, float]]:
    """Return the seconds of each phase, in the order in which they happen."""
    phases = (*PHASES, *sorted(set(fault.seconds) - set(PHASES)))
    return [(phase, fault.seconds[phase]) for phase in phases if phase in fault.seconds]


def timeline_lines(job: JobRecord) -> list[str]:
    """Return what happened, oldest first: faults, and Events that tell of something else."""
    rows = [(fault.started_at, f"fault {fault.id}", _fault_line(fault, job)) for fault in job.faults]
    rows += [(note.time, note.reason, note.message) for note in job.notes if note.reason != "Recovered"]
    rows.sort(key=lambda row: row[0])
    width = max((len(row[1]) for row in rows), default=0)
    head = [f"{job.title}: {headline(job)}", *([f"  before: {job.forgotten}"] if job.forgotten else [])]
    if not rows:
        return [*head, "  nothing happened since" if job.forgotten else "  nothing happened yet"]
    return [*head, *(f"  {clock(time)}  {what:<{width}}  {text}" for time, what, text in rows)]


def list_lines(jobs: Iterable[JobRecord]) -> list[str]:
    """Return a table of jobs."""
    head = ("NAMESPACE", "JOB", "STATE", "RANKS", "SPARE", "LOST", "ITERATION", "RESTARTS", "ETTR", "LAST FAULT")
    rows = [head, *map(_cells, jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def culprit(fault: FaultSummary) -> str:
    """Return who failed and where."""
    places = [fault.pod and f"pod {fault.pod}", fault.node and f"node {fault.node}"]
    if fault.domain != fault.node:
        places.append(fault.domain and f"domain {fault.domain}")
    who = ["" if fault.rank is None else f"rank {fault.rank}", *places]
    nobody = "rank not known" if fault.cause == Cause.SOFT_TIMEOUT else "nobody in particular: the job as a whole"
    return ", ".join(part for part in who if part) or nobody


def done(fault: FaultSummary, job: JobRecord) -> str:
    """Return what repaired it."""
    if not fault.is_recovered:
        return (
            "not repaired: the job failed" if job.state == "Failed" else f"under way, rung {fault.rung or 'none yet'}"
        )
    moves = [(fault.pod, fault.taken_by), *((other.pod, other.taken_by) for other in fault.others)]
    takers = takers_text(fault.replaced_by, moves)
    seconds = f"{sum(fault.seconds.values()):.3f} s"
    return f"rung {fault.rung}, {seconds}, iteration {fault.iteration}{f'; {takers}' if takers else ''}"


def also(fault: FaultSummary) -> list[str]:
    """Return what else failed in the same recovery, one text each."""
    rest = rest_text(fault.cause, fault.num_faults, len(fault.others))
    if fault.others_noted:
        return [f"and {text}" for text in fault.others_noted.split("; and ")]
    return [f"and {text}" for text in (*other_texts(fault.cause, fault.detail, fault.others), rest) if text]


def age(text: str, now: datetime) -> str:
    """Return how long ago, in the two largest units."""
    then = moment(text)
    if then is None:
        return "at an unknown time"
    seconds = int((now - then).total_seconds())
    if seconds < 0:
        return "just now"
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // part} {smaller} ago"
    return f"{seconds} s ago"


def paint(lines: Sequence[str]) -> list[str]:
    """Return the lines for a terminal: the first is bold, labels are dim."""
    head, *rest = lines
    return [f"\033[1m{head}\033[0m", *(f"\033[2m{line[:_LABEL_WIDTH]}\033[0m{line[_LABEL_WIDTH:]}" for line in rest)]


def _also(fault: FaultSummary) -> list[str]:
    texts = also(fault)
    return _row("also", "\n".join(texts)) if texts else []


def _row(label: str, text: str) -> list[str]:
    first, *rest = text.splitlines() or [""]
    return [f"  {label:<{_LABEL_WIDTH - 2}}{first}", *(" " * _LABEL_WIDTH + line for line in rest)]


def _steps(steps: Sequence[str]) -> list[str]:
    first, *rest = steps
    return _row("next", first) + [line for step in rest for line in _row("", step)]


def _what(fault: FaultSummary) -> str:
    return f"{fault.cause}: {fault.detail}" if fault.detail else fault.cause


def _when(text: str, now: datetime) -> str:
    return f"{age(text, now)} ({text})"


def clock(text: str) -> str:
    """Return a time of the API server, UTC, to the second."""
    then = moment(text)
    return f"{then:%Y-%m-%d %H:%M:%S}" if then is not None else f"{'?':<19}"


def _ranks(job: JobRecord, now: datetime) -> str:
    ettr = "" if job.ettr is None else f", ETTR {job.ettr:.2f}"
    counts = f"{job.active_ranks} active, {job.spare_ranks} spare"
    # A job that never started has lost nothing, and one that is suspended or over wants no ranks.
    counts += f", {job.lost_ranks} lost" if job.iteration >= 0 and job.state not in _WITHOUT_RANKS else ""
    recent = len(recent_faults(job, now))
    lately = f" ({recent} in the last {STORM_S // 60} min)" if recent >= MIN_FAULTS_OF_A_STORM else ""
    return f"{'unknown' if job.active_ranks is None else counts}; restarts {job.restarts}{lately}{ettr}"


def time_text(job: JobRecord, now: datetime) -> str:
    """Return where the time went, and the ratios."""
    shares = shares_text(job.time or {})
    if not shares:
        return "none yet"
    # The operator writes it with other news, or once in half an hour.
    at = "" if not job.time_at else f", as of {age(job.time_at, now)} ({job.time_at})"
    return f"{shares}{at}\n{ratios_text(job.ratios or {})}"


def _fault_line(fault: FaultSummary, job: JobRecord) -> str:
    what = ", ".join([_what(fault).splitlines()[0], *also(fault)])
    return f"{culprit(fault)}: {what} -> {done(fault, job)}"


def _cells(job: JobRecord) -> tuple[str, ...]:
    last = job.faults[-1].cause if job.faults else ""
    ettr = "" if job.ettr is None else f"{job.ettr:.2f}"
    ranks = map(count_text, (job.active_ranks, job.spare_ranks, job.lost_ranks))
    counts = (*ranks, iteration_text(job), str(job.restarts))
    return (job.namespace, job.name, job.state or "Unseen", *counts, ettr, last)


def count_text(count: int | None) -> str:
    """Return a count that may not be known."""
    return "?" if count is None else str(count)


def iteration_text(job: JobRecord) -> str:
    """Return the iteration; before the first start there is none."""
    return "-" if job.iteration < 0 else str(job.iteration)
