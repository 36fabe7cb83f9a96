"""What the terminal shows: the differences between two statuses, one line each. Pure."""

import re

from unbroken_core.protocol.messages import JobStatus, Recovery
from unbroken_core.recovery.account import ratios, ratios_text, shares_text, terms
from unbroken_core.recovery.fault_words import other_texts, rest_text, takers_text
from unbroken_core.recovery.health import finding_text
from unbroken_core.vocabulary.checkpoints import LoadSource
from unbroken_core.vocabulary.findings import LOG_LINES, STRAGGLERS, WAS_SLOW, Verdict
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Cause, JobPhase

_OVER = (JobPhase.COMPLETE, JobPhase.FAILED)
_WAITING = (JobPhase.FORMING, JobPhase.INTERRUPTED, JobPhase.ENDING)
_FIRST_WORD_S = 1.0
_EACH_S = 10.0
_LONG_S = 30.0
_SHORTEST_S = 0.05
_NUMBER = re.compile(r"[0-9]+")
_MAX_FINDINGS = 5
"""New ones that one status tells: a fleet may have thousands."""
_MINUTE_S = 60.0
_MAX_A_MINUTE = 60
"""Lines about findings: a check may find another thing with each look."""


def narrate(before: JobStatus | None, after: JobStatus) -> list[str]:
    """Return the lines that lead from one status to the next."""
    lines = [*_recoveries(before, after)]
    has_moved = before is None or before.phase is not after.phase
    if after.phase is JobPhase.RUNNING and (has_moved or (before and before.iteration != after.iteration)):
        spares = f", {after.spare_ranks} spare" if after.spare_ranks else ""
        lost = f", {after.lost_ranks} lost" if after.lost_ranks else ""
        lines.append(f"training: iteration {after.iteration}, {counted(after.world_size, 'rank')}{spares}{lost}")
    elif after.phase in _OVER and has_moved:
        lines.append(f"{after.phase}: {after.message}")
    return [*lines, *_anew(before, after), *_findings(before, after), *_gone(before, after), *_held(before, after)]


def account_line(status: JobStatus | None) -> list[str]:
    """Return the line that says where the time went; none for a job that never trained."""
    shares = "" if status is None or status.time is None else shares_text(terms(status.time))
    if status is None or status.time is None or not shares:
        return []
    return [f"time: {shares}; {ratios_text(ratios(status.time))}"]


def exit_code(failed: JobStatus) -> int:
    """Return the code with which a failed run ends: that of `sys.exit` where that is why, else 1."""
    last = failed.recoveries[-1] if failed.recoveries else None
    if last is None or last.ended_at or last.cause is not Cause.BASE_EXCEPTION:
        return 1
    found = re.fullmatch(r"SystemExit: (-?\d{1,9})", last.detail, re.ASCII)
    # As the kernel does, but never 0.
    return 1 if found is None else int(found[1]) & 0xFF or 1


class LongWaits:
    """What a job waits for: said once it has stood for a second, and then every ten with how long it waits."""

    def __init__(self) -> None:
        self._text = ""
        self._since_s = self._next_s = 0.0

    def tell(self, status: JobStatus | None, now_s: float) -> str | None:
        """Return what is to be said now, if anything."""
        if status is None or status.phase not in _WAITING:
            self._text = ""
            return None
        text = f"{status.phase}: {status.message}" if status.phase is JobPhase.FORMING else status.message
        if text != self._text:
            # Most waits are over before a person could read what for.
            self._since_s = self._since_s if self._text else now_s
            self._text, self._next_s = text, now_s + _FIRST_WORD_S
            return None
        if now_s < self._next_s:
            return None
        self._next_s = now_s + _EACH_S
        waited_s = now_s - self._since_s
        return text if waited_s < _EACH_S else f"{text} (for {waited_s:.0f} s)"

    def due_s(self, now_s: float) -> float:
        """Return in how many seconds there may be something to say, if nothing changes until then."""
        return max(self._next_s - now_s, _SHORTEST_S) if self._text else _LONG_S


class Story:
    """What the terminal shows of a job, status by status."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._status: JobStatus | None = None
        self._waits = LongWaits()
        self._has_faults = False
        self._anew: list[str] = []
        self._minute_s, self._num_told = -_MINUTE_S, 0

    def tell(self, status: JobStatus, now_s: float) -> list[str]:
        """Return what is to be said now. Quietly: faults and recoveries, why it failed, and the end after a fault."""
        before, self._status = self._status, status
        lines = self._rationed(narrate(before, status), {*_findings(before, status), *_gone(before, status)}, now_s)
        anew = _anew(before, status)
        self._anew = anew or self._anew
        faults = [*_recoveries(before, status), *anew]
        self._has_faults = self._has_faults or bool(faults)
        wait = self._waits.tell(status, now_s)
        if not self._is_quiet:
            return lines if wait is None else [*lines, wait]
        has_end = status.phase is JobPhase.FAILED or (status.phase is JobPhase.COMPLETE and self._has_faults)
        return lines if has_end else faults

    def _rationed(self, lines: list[str], rationed: set[str], now_s: float) -> list[str]:
        """Return the lines, of some of them as many as a minute may have, and once that there are more."""
        if now_s >= self._minute_s + _MINUTE_S:
            self._minute_s, self._num_told = now_s, 0
        kept = []
        for line in lines:
            if line in rationed:
                self._num_told += 1
                if self._num_told == _MAX_A_MINUTE:
                    kept.append("more is found, or comes and goes, than is told here: see `unbroken status`")
                if self._num_told >= _MAX_A_MINUTE:
                    continue
            kept.append(line)
        return kept

    def end(self, status: JobStatus | None) -> list[str]:
        """Return what is said before the last words: where the time went, and whether the training began anew.

        Quietly: only after a fault.
        """
        return [] if self._is_quiet and not self._has_faults else [*account_line(status), *self._anew]

    def due_s(self, now_s: float) -> float:
        """Return in how many seconds there may be something to say, if nothing changes until then."""
        return self._waits.due_s(now_s)


def _recoveries(before: JobStatus | None, after: JobStatus) -> list[str]:
    # Each rendezvous counts from 1.
    is_same = before is not None and before.term == after.term
    known = {recovery.number: recovery for recovery in before.recoveries} if before is not None and is_same else {}
    lines = []
    for recovery in after.recoveries:
        old = known.get(recovery.number)
        if old is None or _culprit(old) != _culprit(recovery):
            # The first fault may be a consequence whose agent was quicker than the culprit's.
            lines.append(_fault(recovery))
        lines += _others(old, recovery)
        if recovery.ended_at and (old is None or not old.ended_at):
            lines.append(_recovered(recovery))
    return lines


def _anew(before: JobStatus | None, after: JobStatus) -> list[str]:
    """Return that the training has begun at its beginning again, since nothing was restored."""
    memory = after.memory
    if memory is None or not _has_begun_anew(after) or (before is not None and _has_begun_anew(before, after)):
        return []
    why = f": {memory.reason}" if memory.reason else ""
    return [
        f"training began anew in iteration {after.iteration}, since nothing was restored, {memory.redone_text}{why}"
    ]


def _has_begun_anew(status: JobStatus, later: JobStatus | None = None) -> bool:
    """Return whether the training has, in the iteration in force; in that of a later status if there is one."""
    memory = status.memory
    is_it = memory is not None and memory.source == LoadSource.NOTHING.value and memory.steps_redone > 0
    return is_it and (later is None or status.iteration == later.iteration)


def _findings(before: JobStatus | None, after: JobStatus) -> list[str]:
    """Return what is wrong now and was not before: of watches, of slow ranks, of log rules."""
    known = {(pod, check, entity) for pod, check, entity, _text in _found(before)}
    new = [(pod, text) for pod, check, entity, text in _found(after) if (pod, check, entity) not in known]
    more = [f"and {counted(len(new) - _MAX_FINDINGS, 'more finding')}"] if len(new) > _MAX_FINDINGS else []
    return [f"found in {pod}: {text}" for pod, text in new[:_MAX_FINDINGS]] + more


def _gone(before: JobStatus | None, after: JobStatus) -> list[str]:
    """Return what was wrong and is not any more, in pods that are still there: those that left took theirs along."""
    if after.phase in _OVER or after.health is None or after.health.num_findings > len(after.health.findings):
        return []
    pods = {each.pod for each in after.pods}
    left = {(each.pod, each.finding.check, each.finding.entity) for each in after.health.findings}
    gone = [(pod, text) for pod, check, entity, text in _found(before) if (pod, check, entity) not in left]
    told = [f"no longer found in {pod}: {text}" for pod, text in gone if pod in pods]
    more = [f"and {counted(len(told) - _MAX_FINDINGS, 'more finding')} no longer"] if len(told) > _MAX_FINDINGS else []
    return told[:_MAX_FINDINGS] + more


def _held(before: JobStatus | None, after: JobStatus) -> list[str]:
    """Return why nothing moves for what was found, from when that is so, and when it is over."""
    was = "" if before is None or before.health is None else before.health.held
    now = "" if after.health is None else after.health.held
    if after.phase in _OVER or _NUMBER.sub("", was) == _NUMBER.sub("", now):
        return []  # Of more pods of the same alarm the status tells.
    return [f"health: {now}" if now else "health: nothing holds back what was found any more"]


def _found(status: JobStatus | None) -> list[tuple[str, str, str, str]]:
    """Return pod, check, entity and words of what people should know; what is only degraded comes and goes."""
    found = () if status is None or status.health is None else status.health.findings
    return [
        (each.pod, each.finding.check, each.finding.entity, finding_text(each.finding))
        for each in found
        if each.finding.verdict in (Verdict.FATAL, Verdict.SUSPECT)
        or (each.finding.check in (LOG_LINES, STRAGGLERS) and each.finding.code != WAS_SLOW)
    ]


def _culprit(recovery: Recovery) -> tuple[Cause, int | None, str, str]:
    # Who hangs is known a moment later, or is not.
    words = recovery.detail if recovery.cause is Cause.SOFT_TIMEOUT else ""
    return recovery.cause, recovery.rank, recovery.pod, words


def _fault(recovery: Recovery) -> str:
    who = f"rank {recovery.rank} in {recovery.pod}" if recovery.rank is not None else recovery.pod or "the job"
    rest = rest_text(recovery.cause, recovery.num_faults, len(recovery.others))
    more = f" (and {rest})" if rest else ""
    detail = f": {recovery.detail}" if recovery.detail else ""
    return f"fault {recovery.number}: {recovery.cause} of {who}{detail}{more}"


def _others(old: Recovery | None, recovery: Recovery) -> list[str]:
    """Return what else has failed since; who was taken for the culprit before was told as that."""
    told: set[tuple[str, int | None, Cause]] = set()
    if old is not None:
        told = {(old.pod, old.rank, old.cause), *((one.pod, one.rank, one.cause) for one in old.others)}
    new = [other for other in recovery.others if (other.pod, other.rank, other.cause) not in told]
    texts = other_texts(recovery.cause, recovery.detail, new)
    return [f"fault {recovery.number}, and {text}" for text in texts]


def _recovered(recovery: Recovery) -> str:
    phases = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in recovery.phase_s.items())
    total_s = sum(recovery.phase_s.values())
    moves = [(recovery.pod, recovery.taken_by), *((other.pod, other.taken_by) for other in recovery.others)]
    takers = takers_text(recovery.replaced_by, moves)
    who = f", {takers}" if takers else ""
    size = ""
    if recovery.world_size_before != recovery.world_size_after:
        size = f", {recovery.world_size_before} -> {counted(recovery.world_size_after, 'rank')}"
    return f"recovered {recovery.number}: rung {recovery.rung}{who}{size} in {_duration(total_s)} ({phases})"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
