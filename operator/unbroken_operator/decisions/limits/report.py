"""Pure: what one job's rendezvous may report, by the job's own spec. Its image is the user's, so a report is input.

    body ──too long──> refused, unread
      └──> JSON ──lists too long──> refused before objects are made of it
             └──> JobStatus ──a name, number or time out of bounds──> refused, else texts are cut

What is about now (pods, ranks) is bounded by the job's size; what is about the past may be of a larger job.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_core.pod.stacks import bounded
from unbroken_core.protocol.messages import HealthStatus, JobStatus, PodStatus, Recovery
from unbroken_core.protocol.settings import MAX_PODS, MAX_RANKS_PER_POD
from unbroken_core.protocol.wire import MAX_MESSAGE_BYTES, decode
from unbroken_core.recovery.fault_words import MAX_OTHER
from unbroken_core.vocabulary.checkpoints import LoadSource, MemoryStatus
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.findings import MAX_FINDINGS
from unbroken_core.vocabulary.names import MAX_DOMAINS, MAX_NAME, NAME
from unbroken_core.vocabulary.reasons import Cause, Phase, Rung
from unbroken_operator.decisions.limits.fitting import is_time

BASE_BYTES = 1 << 20
"""Of a report without pods: twenty recoveries with their errors and stacks."""
POD_BYTES, RANK_BYTES = 2048, 32
SPARE_PODS = 16
"""So many pods more than twice the job's may be reported: those that came, and those that went meanwhile."""
MAX_RECOVERIES, MAX_REFUSED, MAX_TAKERS = 20, 64, 64
MAX_OTHERS = 16
"""Other faults of a recovery. A rendezvous tells four; a later one may tell more."""
MAX_DOMAIN, MAX_TEXT = 1000, 2000
MAX_SHOWN = 120
MAX_COUNT = 1 << 53
MAX_STEP = 1 << 63
MAX_SECONDS = 1e9
_PART = " (in part)"
"""As a rendezvous of an earlier release calls a check of which a part is known."""
_YEAR = re.compile(r"(19[7-9]\d|[2-9]\d{3})-")


@dataclass(frozen=True)
class ReportLimits:
    """The size of one job."""

    pods: int
    ranks_per_pod: int
    known: frozenset[str] | None = None
    """Uids of the job's pods that exist; None: of whatever pods, all is kept."""

    @property
    def bytes(self) -> int:
        """Longest report that is read."""
        return min(MAX_MESSAGE_BYTES, BASE_BYTES + self.pods * (POD_BYTES + RANK_BYTES * self.ranks_per_pod))

    @property
    def ranks(self) -> int:
        """Most ranks of any kind."""
        return self.pods * self.ranks_per_pod


ABSOLUTE = ReportLimits(2 * MAX_PODS + SPARE_PODS, MAX_RANKS_PER_POD)


def wanted_pods(spec: Any) -> int:
    """Return how many training pods a stored spec asks for, sound or not."""
    fields = spec if isinstance(spec, dict) else {}
    spares = fields.get("spares")
    num_spares = _count((spares if isinstance(spares, dict) else {}).get("count"), 0, MAX_PODS)
    return _count(fields.get("replicas"), 1, MAX_PODS) + num_spares


def report_limits(
    spec: Any, num_pods: int, num_ordinals: int = MAX_PODS, known: frozenset[str] | None = None
) -> ReportLimits:
    """Return the limits of a job. `num_pods` is the most that it had lately; `num_ordinals` of them were ever made.

    What a spec asks for counts only as far as it was made: to ask for 65,536 pods costs nothing.
    """
    fields = spec if isinstance(spec, dict) else {}
    most = min(max(min(wanted_pods(spec), num_ordinals), num_pods), MAX_PODS)
    ranks = max(1, _count(fields.get("ranksPerPod"), 1, MAX_RANKS_PER_POD))
    return ReportLimits(2 * most + SPARE_PODS, ranks, known)


def read_report(body: bytes, limits: ReportLimits) -> JobStatus:
    """Read a report. Raises WireError that says what is wrong with it, in bounded words and time."""
    if len(body) > limits.bytes:
        raise WireError(f"report: want at most {limits.bytes} bytes for a job of this size, got {len(body)}")
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"report: want JSON, got {body[:MAX_SHOWN]!r}") from error
    for violation in _shape_violations(data, limits):
        raise WireError(f"report{violation}")
    try:
        status: JobStatus = decode(body, JobStatus)
    except WireError as error:
        raise WireError(str(error)[: 4 * MAX_SHOWN]) from None
    for violation in _violations(status, limits):
        raise WireError(f"report{violation}")
    return _cut(dataclasses.replace(status, pods=tuple(_kept_pods(status.pods, limits.known))))


def _count(value: Any, default: int, limit: int) -> int:
    return min(max(value, 0), limit) if type(value) is int else default


def _shape_violations(data: Any, limits: ReportLimits) -> Iterator[str]:
    """Yield which lists are too long: to make objects of them would take long."""
    if not isinstance(data, dict):
        yield f": want a JSON object, got {type(data).__name__}"
        return
    for field, most in (("pods", limits.pods), ("recoveries", MAX_RECOVERIES), ("refused", MAX_REFUSED)):
        yield from _too_long(f".{field}", data.get(field), most)
    for field, words in (("restarts_by_rung", Rung), ("restarts_by_cause", Cause)):
        yield from _too_long(f".{field}", data.get(field), len(words))
    recoveries = data.get("recoveries")
    for recovery in recoveries if isinstance(recoveries, list) else ():
        yield from _too_long(
            ".recoveries[].others", recovery.get("others") if isinstance(recovery, dict) else None, MAX_OTHERS
        )
    health = data.get("health")
    if isinstance(health, dict):
        for field in ("findings", "unchecked"):
            yield from _too_long(f".health.{field}", health.get(field), MAX_FINDINGS)
    pods = data.get("pods")
    for pod in pods if isinstance(pods, list) else ():
        for field, most in (
            ("ranks", limits.ranks_per_pod),
            ("workers", limits.ranks_per_pod),
            ("domains", MAX_DOMAINS),
        ):
            yield from _too_long(f".pods[].{field}", pod.get(field) if isinstance(pod, dict) else None, most)


def _too_long(where: str, items: Any, most: int) -> Iterator[str]:
    if isinstance(items, list | dict) and len(items) > most:
        yield f"{where}: want at most {most} for a job of this size, got {len(items)}"


def _violations(status: JobStatus, limits: ReportLimits) -> Iterator[str]:
    yield from _outside(
        (".protocol", status.protocol, 0, MAX_COUNT),
        (".term", status.term, 0, MAX_COUNT),
        (".revision", status.revision, 0, MAX_COUNT),
        (".iteration", status.iteration, -1, MAX_COUNT),
        (".world_size", status.world_size, 0, limits.ranks),
        (".spare_ranks", status.spare_ranks, 0, limits.ranks),
        (".lost_ranks", status.lost_ranks, 0, limits.ranks),
        (".broken_spares", status.broken_spares, 0, MAX_COUNT),
        (".max_step", status.max_step, -MAX_STEP, MAX_STEP),
        (".ettr", status.ettr, 0, 1.01),
        (".gained_s", status.gained_s, 0, MAX_SECONDS),
        (".ran_for_s", status.ran_for_s, 0, MAX_SECONDS),
        (".still_for_s", status.still_for_s, 0, MAX_SECONDS),
    )
    yield from _counts(".restarts_by_rung", status.restarts_by_rung, {rung.value for rung in Rung})
    yield from _counts(".restarts_by_cause", status.restarts_by_cause, {cause.value for cause in Cause})
    if status.memory is not None:
        yield from _memory_violations(status.memory)
    if status.health is not None:
        yield from _health_violations(status.health, limits)
    for pod in status.pods:
        yield from _pod_violations(pod, limits)
    for recovery in status.recoveries:
        yield from _recovery_violations(recovery)


def _outside(*numbers: tuple[str, float | None, float, float]) -> Iterator[str]:
    for where, number, least, most in numbers:
        if number is not None and not least <= number <= most:
            yield f"{where}: want {least:.16g} to {most:.16g}, got {_shown(number)}"


def _shown(value: float | str) -> str:
    # A number of thousands of digits has no text in Python.
    is_huge = isinstance(value, int) and value.bit_length() > 128
    return f"a number of {value.bit_length()} bits" if is_huge and isinstance(value, int) else repr(value)[:MAX_SHOWN]


def _counts(where: str, counts: Mapping[str, int], words: set[str]) -> Iterator[str]:
    for word, count in counts.items():
        if word not in words:
            yield f"{where}: want words of {sorted(words)}, got {_shown(word)}"
        yield from _outside((where, count, 0, MAX_COUNT))


def _names(*names: tuple[str, str, int]) -> Iterator[str]:
    for where, name, most in names:
        if len(name) > most:
            yield f"{where}: want at most {most} characters, got {len(name)}"
        elif not NAME.fullmatch(name):
            # People copy them into commands.
            yield f"{where}: want a name of Kubernetes, got {_shown(name)}"


def _pod_violations(pod: PodStatus, limits: ReportLimits) -> Iterator[str]:
    where = ".pods[]"
    yield from _names(
        (f"{where}.pod", pod.pod, MAX_NAME), (f"{where}.uid", pod.uid, MAX_NAME), (f"{where}.node", pod.node, MAX_NAME)
    )
    yield from _names(*((f"{where}.domains", name, MAX_DOMAIN) for name in pod.domains))
    if len(pod.unfit) > MAX_TEXT:
        yield f"{where}.unfit: want at most {MAX_TEXT} characters, got {len(pod.unfit)}"
    yield from _outside(*((f"{where}.ranks", rank, 0, limits.ranks) for rank in pod.ranks))


def _health_violations(health: HealthStatus, limits: ReportLimits) -> Iterator[str]:
    where = ".health"
    yield from _outside(
        (f"{where}.num_pods", health.num_pods, 0, limits.pods),
        (f"{where}.num_paced", health.num_paced, 0, limits.ranks),
        (f"{where}.num_findings", health.num_findings, 0, limits.pods * MAX_FINDINGS),
        *((f"{where}.unchecked", num_pods, 0, limits.pods) for _check, num_pods in health.unchecked),
    )
    names = [(f"{where}.unchecked", check.removesuffix(_PART), MAX_DOMAIN) for check, _num_pods in health.unchecked]
    for item in health.findings:
        names += [(f"{where}.findings[].pod", item.pod, MAX_NAME), (f"{where}.findings[].node", item.node, MAX_NAME)]
    yield from _names(*names)
    if len(health.held) > MAX_TEXT:
        yield f"{where}.held: want at most {MAX_TEXT} characters, got {len(health.held)}"


def _memory_violations(memory: MemoryStatus) -> Iterator[str]:
    where = ".memory"
    yield from _outside(
        (f"{where}.complete_step", memory.complete_step, -1, MAX_STEP),
        (f"{where}.protected_step", memory.protected_step, -1, MAX_STEP),
        (f"{where}.restored_step", memory.restored_step, -1, MAX_STEP),
        (f"{where}.disk_step", memory.disk_step, -1, MAX_STEP),
        (f"{where}.disk_every", memory.disk_every, 0, MAX_STEP),
        (f"{where}.steps_redone", memory.steps_redone, 0, MAX_STEP),
    )
    if memory.source not in _SOURCES:
        yield f"{where}.source: want words of {sorted(_SOURCES)}, got {_shown(memory.source)}"
    if len(memory.reason) > _MAX_REASON:
        yield f"{where}.reason: want at most {_MAX_REASON} characters, got {len(memory.reason)}"
    if len(memory.across) > _MAX_REASON:
        yield f"{where}.across: want at most {_MAX_REASON} characters, got {len(memory.across)}"
    if len(memory.disk_problem) > _MAX_REASON:
        yield f"{where}.disk_problem: want at most {_MAX_REASON} characters, got {len(memory.disk_problem)}"


def _recovery_violations(recovery: Recovery) -> Iterator[str]:
    where = ".recoveries[]"
    yield from _outside(
        (f"{where}.number", recovery.number, 0, MAX_COUNT),
        (f"{where}.rank", recovery.rank, 0, ABSOLUTE.ranks),
        (f"{where}.iteration_before", recovery.iteration_before, -1, MAX_COUNT),
        (f"{where}.iteration_after", recovery.iteration_after, -1, MAX_COUNT),
        (f"{where}.world_size_before", recovery.world_size_before, 0, ABSOLUTE.ranks),
        (f"{where}.world_size_after", recovery.world_size_after, 0, ABSOLUTE.ranks),
        (f"{where}.num_faults", recovery.num_faults, 0, MAX_COUNT),
        *((f"{where}.phase_s", seconds, -MAX_SECONDS, MAX_SECONDS) for seconds in recovery.phase_s.values()),
    )
    for phase in recovery.phase_s:
        if phase not in _PHASES:
            yield f"{where}.phase_s: want words of {sorted(_PHASES)}, got {_shown(phase)}"
    yield from _names(
        (f"{where}.pod", recovery.pod, MAX_NAME),
        (f"{where}.node", recovery.node, MAX_NAME),
        (f"{where}.domain", recovery.domain, MAX_DOMAIN),
        (f"{where}.taken_by", recovery.taken_by, MAX_NAME),
    )
    for other in recovery.others:
        yield from _outside((f"{where}.others[].rank", other.rank, 0, ABSOLUTE.ranks))
        yield from _names(
            (f"{where}.others[].pod", other.pod, MAX_NAME), (f"{where}.others[].taken_by", other.taken_by, MAX_NAME)
        )
    yield from _names(*((f"{where}.replaced_by", name, MAX_NAME) for name in recovery.replaced_by))
    times = ((".started_at", recovery.started_at), (".ended_at", recovery.ended_at or recovery.started_at))
    yield from (
        f"{where}{field}: want a time such as 2026-01-01T00:00:00Z, got {_shown(time)}"
        for field, time in times
        if not _is_time(time)
    )


_SOURCES = {"", *(source.value for source in LoadSource)}
_MAX_REASON = 1000
_PHASES = frozenset(phase.value for phase in Phase)


def _is_time(text: str) -> bool:
    return len(text) <= 40 and bool(_YEAR.match(text)) and is_time(text)


def _kept_pods(pods: Iterable[PodStatus], known: frozenset[str] | None) -> Iterator[PodStatus]:
    """Yield what is worth keeping: an entry of each pod that exists, and of others as many as may have come or gone.

    A report is held until the next one, and takes ten times its length.
    """
    if known is None:
        yield from pods
        return
    missing, num_left = set(known), 2 * len(known) + SPARE_PODS
    for pod in pods:
        if pod.uid in missing:
            missing.discard(pod.uid)
            yield pod
        elif num_left > 0:
            num_left -= 1
            yield pod


def _cut(status: JobStatus) -> JobStatus:
    """Return the report without what nobody would read to the end."""
    recoveries = tuple(
        dataclasses.replace(
            item,
            detail=item.detail[:MAX_TEXT],
            domain=item.domain[:MAX_NAME],
            replaced_by=item.replaced_by[:MAX_TAKERS],
            stack=bounded(item.stack),
            others=tuple(dataclasses.replace(other, detail=other.detail[:MAX_OTHER]) for other in item.others),
        )
        for item in status.recoveries
    )
    refused = tuple(text[:MAX_TEXT] for text in status.refused)
    return dataclasses.replace(status, message=status.message[:MAX_TEXT], recoveries=recoveries, refused=refused)
