"""What happened: the running recovery, and the finished ones.

All times are seconds of the coordinator's clock; they become wall-clock text only in a status.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from unbroken_core.protocol.bounds import MAX_SECONDS
from unbroken_core.protocol.messages import OtherFault, Recovery, Repair
from unbroken_core.recovery.fault_words import one_line
from unbroken_core.recovery.mistakes import has_given_up, is_mistake
from unbroken_core.vocabulary.reasons import Cause, Phase, Rung

MAX_RECOVERIES = 20
MAX_OTHERS = 4
"""Faults of a recovery, besides the culprit's, that are told."""
SCRIPT_CAUSES = frozenset(
    (
        Cause.EXCEPTION,
        Cause.BASE_EXCEPTION,
        Cause.STALE_STATE,
        Cause.LOG_RULE,
        Cause.SOFT_TIMEOUT,
        Cause.HARD_TIMEOUT,
        Cause.PROCESS_EXIT,
    )
)
"""Causes that a defect of the script has; lost pods and killed processes say nothing about it."""
NEVER_GOT_PLAN = "never got the plan: its agent was restarted at that moment"
"""What is wrong with a worker that waits, soundly, for a plan that is in force."""

_HANGS = (Cause.SOFT_TIMEOUT, Cause.HARD_TIMEOUT)
_ASKS = "asks all ranks what they do"
_HEIGHT = {rung: number for number, rung in enumerate(Rung)}
_MAX_MISTAKES = 64
"""Of one recovery, by their words."""
_MAX_TRIES = 16
"""Of those in a row without progress that are remembered."""


@dataclass(frozen=True)
class FaultRecord:
    """One fault that the coordinator collected."""

    cause: Cause
    pod_uid: str
    local_rank: int | None
    """None for a fault of the whole pod."""
    at_s: float
    """The fault instant: when it was reported, less the age that the pod gave it."""
    detect_s: float = 0.0
    incarnation: int = -1
    rank: int | None = None
    pod: str = ""
    node: str = ""
    domain: str = ""
    detail: str = ""
    stack: tuple[str, ...] = ()
    is_certain: bool = False
    """Of a soft-timeout: whether the worker hangs itself."""
    is_hang: bool = False
    """Of a soft-timeout: whether who hangs is judged by what all ranks do (hangs.py), and not by who reports first."""
    waited: bool = False
    """Of a hard-timeout: whether the worker was waiting for other ranks when it was told to leave."""
    rule: str = ""
    """Name of the log rule that has found it."""
    lost_ranks: tuple[int, ...] = ()
    """Of a pod that this coordinator never heard: the ranks that it had."""

    @property
    def is_agents(self) -> bool:
        """Whether the agent was at fault, and nothing is known against the worker."""
        return self.cause is Cause.EXCEPTION and self.detail == NEVER_GOT_PLAN

    @property
    def text(self) -> str:
        """The fault, for people."""
        if self.is_hang and not self.pod:
            return f"{self.cause}: {self.detail}"
        who = f"rank {self.rank} of {self.pod}" if self.rank is not None else self.pod or "a pod"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.cause} of {who}{detail}"


@dataclass
class Incident:
    """One recovery, from the first fault until every active worker runs again."""

    number: int
    started_s: float
    iteration_before: int
    world_size_before: int
    faults: dict[tuple[str, int | None], FaultRecord] = field(default_factory=dict)
    rung: Rung | None = None
    """The highest rung taken so far; None before the first."""
    iteration_after: int = -1
    world_size_after: int = 0
    replaced_by: dict[str, None] = field(default_factory=dict)
    num_plans: int = 0
    planned_s: float | None = None
    ended_s: float | None = None
    phase_s: dict[str, float] = field(default_factory=dict)
    is_barren: bool = False
    """Whether the job made no progress since the recovery before."""
    verdict: FaultRecord | None = None
    """Of a hang: whom the evidence of all ranks names; None until it is judged."""
    found_s: float | None = None
    """When a new coordinator learned of a loss that it was not there to see; None: it saw it itself."""
    _first: FaultRecord | None = field(default=None, init=False)
    _culprit: FaultRecord | None = field(default=None, init=False)
    _hang: FaultRecord | None = field(default=None, init=False)
    """The first report of a hang."""
    _stood: FaultRecord | None = field(default=None, init=False)
    """The strongest report of a worker that made no progress."""
    _by_mistake: dict[tuple[str, ...], set[tuple[str, int | None]]] = field(default_factory=dict, init=False)
    """Who has failed with which words."""
    _num_alike: int = field(default=1, init=False)
    """Of a mistake: plans in a row, the last one included, that it ended."""
    _has_varied: bool = field(default=False, init=False)
    """Whether something else ended one of the plans."""
    _num_plans_named: int = field(default=-1, init=False)
    """`num_plans` at the verdict."""
    _by_words: dict[tuple[str, ...], set[str]] = field(default_factory=dict, init=False)
    """Pods that have failed with these words, of faults that a script has."""
    _strongest: dict[tuple[str, int | None], FaultRecord] = field(default_factory=dict, init=False)
    """Some faults, by whose they are: the culprit, and others that are told with it."""
    _takers: dict[int, str] = field(default_factory=dict, init=False)
    """By rank, the pod that was promoted to it last."""
    _ended: list[FaultRecord] = field(default_factory=list, init=False)
    """Of each plan that it took, the first one included, the strongest fault that ended it."""

    @property
    def culprit(self) -> FaultRecord:
        """The fault with the strongest evidence, then the earliest; of hangs the verdict.

        Raises RuntimeError before the first.
        """
        # Kept, not searched for: thousands of ranks may report one fault.
        strongest, hang = self._culprit, self._hang
        if strongest is None:
            raise RuntimeError(f"recovery {self.number}: want a fault, got none")
        if strongest.cause is Cause.POD_LEAVING and self._stood is not None:
            # Nothing stands still because a pod is to leave, but a move takes in all who hang.
            strongest = self._stood
        if hang is None or strongest.cause not in _HANGS:
            return strongest
        verdict = self.verdict or _nobody(hang, _ASKS)
        if strongest.cause is not Cause.HARD_TIMEOUT:
            return verdict
        if self._is_of(strongest, verdict):
            # It hung, and could not be interrupted.
            detail = f"{verdict.detail}; {strongest.detail}" if verdict.detail else strongest.detail
            return replace(strongest, detail=detail, stack=strongest.stack or verdict.stack)
        # Others that could not be interrupted, or who waits and cannot be, are no culprits.
        return verdict if verdict.pod_uid or strongest.waited else strongest

    @property
    def rule(self) -> FaultRecord | None:
        """The first report of a hang, where a log rule has found it."""
        return self._hang if self._hang is not None and self._hang.rule else None

    def name(self, verdict: FaultRecord) -> None:
        """Take a verdict. A later one of the same iteration knows more; one of a later iteration is a consequence."""
        if self.verdict is None or not self.verdict.pod_uid or self._num_plans_named == self.num_plans:
            self.verdict, self._num_plans_named = verdict, self.num_plans

    @staticmethod
    def _is_of(fault: FaultRecord, verdict: FaultRecord) -> bool:
        return (fault.pod_uid, fault.local_rank) == (verdict.pod_uid, verdict.local_rank)

    def add(self, fault: FaultRecord) -> bool:
        """Collect a fault; of each worker the strongest is kept. Return whether it is news."""
        key = (fault.pod_uid, fault.local_rank)
        if is_mistake(fault.cause, fault.detail):
            words = _words(fault)
            if words in self._by_mistake or len(self._by_mistake) < _MAX_MISTAKES:
                self._by_mistake.setdefault(words, set()).add(key)
        if fault.cause in SCRIPT_CAUSES and fault.pod_uid:
            words = _words(fault)
            if words in self._by_words or len(self._by_words) < _MAX_MISTAKES:
                self._by_words.setdefault(words, set()).add(fault.pod_uid)
        self._note_end(fault)
        known = self.faults.get(key)
        is_own = known is not None and known.is_agents and not fault.is_agents
        if known is not None and known.cause.severity >= fault.cause.severity + is_own:
            return False
        self.faults[key] = fault
        self._keep(key, fault)
        self._first = self._first or fault
        if fault.is_hang and self._hang is None:
            self._hang = fault
        if fault.cause in _HANGS and (self._stood is None or _weight(fault) > _weight(self._stood)):
            self._stood = fault
        if self._culprit is None or _weight(fault) > _weight(self._culprit):
            self._culprit = fault
        return True

    def _keep(self, key: tuple[str, int | None], fault: FaultRecord) -> None:
        if fault.is_hang or fault.waited:
            return  # It waited for others: who hangs is told by the verdict.
        self._strongest[key] = fault
        if len(self._strongest) > MAX_OTHERS + 1:
            del self._strongest[min(self._strongest, key=lambda each: _weight(self._strongest[each]))]

    def note_taker(self, pod: str, ranks: Iterable[int]) -> None:
        """Note that a pod was promoted to these ranks."""
        self.replaced_by[pod] = None
        self._takers.update(dict.fromkeys(ranks, pod))

    def _taken_by(self, fault: FaultRecord) -> str:
        taker = "" if fault.rank is None else self._takers.get(fault.rank, "")
        return "" if taker == fault.pod else taker

    def _others(self, culprit: FaultRecord) -> tuple[OtherFault, ...]:
        """Return the faults that are told besides the culprit's, the strongest first."""
        named = [] if self.verdict is None or not self.verdict.pod_uid else [self.verdict]
        known = {(fault.pod_uid, fault.local_rank): fault for fault in (*named, *self._strongest.values())}
        known.pop((culprit.pod_uid, culprit.local_rank), None)
        chosen = sorted(known.values(), key=_weight, reverse=True)[:MAX_OTHERS]
        return tuple(
            OtherFault(fault.cause, fault.rank, fault.pod, one_line(fault.detail), self._taken_by(fault))
            for fault in chosen
        )

    def _note_end(self, fault: FaultRecord) -> None:
        if not self._ended:
            self._ended.append(fault)
        elif _weight(fault) > _weight(self._ended[-1]):
            self._ended[-1] = fault

    def repeat(self, fault: FaultRecord) -> None:
        """Note with what a plan of this recovery has ended before all ranks ran again; `add` follows."""
        is_same = _words(fault) == self.words
        self._num_alike = self._num_alike + 1 if is_same else 0
        self._has_varied = self._has_varied or not is_same
        self._ended.append(fault)

    @property
    def num_tries(self) -> int:
        """Plans that it took so far, the one that was interrupted first included."""
        return max(len(self._ended), 1)

    @property
    def tries(self) -> tuple[frozenset[str], ...]:
        """Return for each of them which pods have failed; none where that says nothing of a pod."""
        if len(self._ended) < 2:
            return (self._who_failed(self.culprit),)
        # Who reports a hang first says nothing of who hangs.
        return tuple(frozenset() if fault.is_hang else self._who_failed(fault) for fault in self._ended)

    def _who_failed(self, fault: FaultRecord) -> frozenset[str]:
        if fault.cause not in SCRIPT_CAUSES or not fault.pod_uid:
            return frozenset()
        return frozenset({fault.pod_uid, *self._by_words.get(_words(fault), ())})

    def num_same(self, words_before: tuple[str, ...], num_before: int) -> int:
        """Return how often in a row its fault has come, if it came so often with these words before it."""
        if self.culprit.cause not in SCRIPT_CAUSES:
            return 0
        # Whether another fault came a second time in one recovery says little: its words may be those of others' loss.
        num_alike = self._num_alike if is_mistake(self.culprit.cause, self.culprit.detail) else 1
        return num_alike + (num_before if self.follows(words_before) else 0)

    def follows(self, words_before: tuple[str, ...]) -> bool:
        """Return whether the recovery before, with these words, was from the same fault, without progress since."""
        is_in_a_row = not self._has_varied or not is_mistake(self.culprit.cause, self.culprit.detail)
        return self.is_barren and is_in_a_row and self.words == words_before

    @property
    def words(self) -> tuple[str, ...]:
        """What tells its fault from others."""
        return _words(self.culprit)

    @property
    def same_workers(self) -> set[tuple[str, int | None]]:
        """Who made this mistake, in any of these plans."""
        return self._by_mistake.get(self.words, set())

    def replace_fault(self, fault: FaultRecord, named: FaultRecord) -> None:
        """Replace a fault by one that says more of the same."""
        key = (fault.pod_uid, fault.local_rank)
        if self.faults.get(key) is fault:
            self.faults[key] = named
            if key in self._strongest:
                self._strongest[key] = named
            self._culprit = named if self._culprit is fault else self._culprit
        self._ended = [named if each is fault else each for each in self._ended]

    def raise_rung(self, rung: Rung) -> None:
        """Note that this rung was needed."""
        self.rung = rung if self.rung is None else max(self.rung, rung, key=_HEIGHT.__getitem__)

    def finish(self, now_s: float) -> None:
        """Note that it is over."""
        self.ended_s = now_s
        self.phase_s[Phase.DETECT.value] = self._detect_s()

    def _detect_s(self) -> float:
        """Return how long something was wrong before this began. What was found later, such as a worker that did not
        leave in time, took its time within."""
        if self.found_s is not None:
            return self.found_s - self.started_s
        # It is known of a pod that it leaves while ranks go on to a step that all save: `at_s` is before that, and
        # nothing had to be detected.
        faults = (self.culprit, self._first or self.culprit)
        return max(max(min(fault.detect_s, self.started_s - fault.at_s), 0.0) for fault in faults)

    def add_phase(self, phase: Phase, seconds: float) -> None:
        """Add to a phase: a recovery that is interrupted goes through its phases several times."""
        self.phase_s[phase.value] = self.phase_s.get(phase.value, 0.0) + max(seconds, 0.0)

    def to_message(self, wall: Callable[[float], str]) -> Recovery:
        """Return it for a status."""
        culprit = self.culprit
        return Recovery(
            number=self.number,
            cause=culprit.cause,
            rung=self.rung,
            rank=culprit.rank,
            pod=culprit.pod,
            node=culprit.node,
            domain=culprit.domain,
            detail=culprit.detail,
            iteration_before=self.iteration_before,
            iteration_after=self.iteration_after,
            replaced_by=tuple(self.replaced_by),
            phase_s={name: min(seconds, MAX_SECONDS) for name, seconds in self.phase_s.items()},
            started_at=wall(self.started_s),
            ended_at="" if self.ended_s is None else wall(self.ended_s),
            world_size_before=self.world_size_before,
            world_size_after=self.world_size_after,
            num_faults=len(self.faults),
            stack=culprit.stack,
            others=self._others(culprit),
            taken_by=self._taken_by(culprit),
        )


def _nobody(fault: FaultRecord, detail: str) -> FaultRecord:
    """Return the fault without a culprit."""
    before = fault.detail if fault.rule else f"no progress for {fault.detect_s:.0f} s"
    text = f"{before}; {detail}"
    return FaultRecord(fault.cause, "", None, fault.at_s, fault.detect_s, detail=text, is_hang=True, rule=fault.rule)


def _words(fault: FaultRecord) -> tuple[str, ...]:
    """Return what tells a fault from others: what it says, and of a mistake in the code where it is.

    Of a log rule it is the rule: each line that matches may have another number in it.
    """
    if fault.rule:
        return ("log rule", fault.rule)
    return (fault.detail, *(fault.stack[-1:] if is_mistake(fault.cause, fault.detail) else ()))


def _weight(fault: FaultRecord) -> tuple[int, bool, float, float]:
    if fault.cause is not Cause.SOFT_TIMEOUT:
        # Whoever raises beside one whose agent was restarted did so by himself.
        return fault.cause.severity, not fault.is_agents, -fault.at_s, 0.0
    # Its instant is that of the last progress: whoever waits for the one that hangs may have stopped before that one.
    # What is reported after the interruption is a consequence, unless it is more certain.
    reported_s = round(fault.at_s + fault.detect_s, 6)
    return fault.cause.severity, fault.is_certain, -reported_s, -fault.at_s


class History:
    """Recoveries of a job."""

    def __init__(self) -> None:
        self.running: Incident | None = None
        self.finished: deque[Incident] = deque(maxlen=MAX_RECOVERIES)
        self.by_rung: dict[Rung, int] = dict.fromkeys(Rung, 0)
        self.by_cause: dict[Cause, int] = dict.fromkeys(Cause, 0)
        self.by_place: dict[tuple[str, int], int] = {}
        """Faults by uid and local rank, where they have a limit: a pod may be lost and come back."""
        self.num_broken_spares = 0
        """Wholly spare pods of which plans took some workers only."""
        self.num_changes = 0
        """Rises with every change but of a phase's seconds."""
        self._num_incidents = 0
        self._num_barren = 0
        self._last_words: tuple[str, ...] = ()
        self._same_workers: set[tuple[str, int | None]] = set()
        """Who failed with these words in the last recoveries in a row."""
        self._num_same = 0
        self._num_of_words: Counter[tuple[str, ...]] = Counter()
        """Recoveries since the last progress, by the words of their fault of the script."""
        self._culprits: frozenset[tuple[str, int | None]] = frozenset()
        """Whose fault the last recoveries in a row were."""
        self._began_in_a_row = 0
        """Number of the first of the last recoveries in a row from the same fault."""
        self._renewed_in = -1
        """Number of the last recovery that gave a process up because its fault came back."""
        self._tries: tuple[frozenset[str], ...] = ()

    def open(
        self, now_s: float, iteration: int, world_size: int, is_barren: bool = False, lost_s: float | None = None
    ) -> Incident:
        """Begin a recovery, of a loss that was at `lost_s` if nobody was there to see it."""
        self.num_changes += 1
        self._num_incidents += 1
        started_s, found_s = (now_s, None) if lost_s is None else (min(lost_s, now_s), now_s)
        self.running = Incident(
            self._num_incidents, started_s, iteration, world_size, is_barren=is_barren, found_s=found_s
        )
        return self.running

    def take_over(self, repair: Repair, fault: FaultRecord, started_s: float, iteration: int) -> None:
        """Go on with a recovery whose coordinator was lost after it had cut the plan of this iteration."""
        self.num_changes += 1
        if self.running is not None:
            self.running.add(fault)  # There was another loss before anybody knew that all ran again.
            return
        self._num_incidents += 1
        incident = Incident(self._num_incidents, started_s, repair.iteration, repair.world_size, num_plans=1)
        incident.add(fault)
        incident.raise_rung(repair.rung)
        incident.iteration_after = iteration
        incident.replaced_by.update(dict.fromkeys(repair.replaced_by))
        incident.add_phase(Phase.STOP, repair.stop_s)
        incident.add_phase(Phase.PLAN, max(repair.ago_s - repair.stop_s, 0.0))
        self.running = incident

    def add(self, fault: FaultRecord) -> bool:
        """Collect a fault into the running recovery, if there is one. Return whether it is news."""
        self.num_changes += 1
        return self.running is not None and self.running.add(fault)

    def name(self, verdict: FaultRecord) -> None:
        """Note whom the evidence of all ranks names, in the running recovery."""
        self.num_changes += 1
        if self.running is not None:
            self.running.name(verdict)

    def note_progress(self, now_s: float) -> None:
        """Note that all workers have made a step since the last recovery."""
        last = self.finished[-1] if self.finished else None
        if last is not None and last.ended_s is not None:
            self.num_changes += 1
            last.add_phase(Phase.FIRST_PROGRESS, now_s - last.ended_s)

    def is_mistake(self, is_active: Callable[[str, int | None], bool], world_size: int) -> bool:
        """Return whether the script makes the running recovery's fault by itself, as far as the active workers tell.

        `is_active` tells that of the uid of a pod and a local rank.

        An error of its code must come from several pods or all workers: one node may lack something. All workers must
        have given up by `sys.exit`, since those of a few pods may do so as their pods are told to end. Some may be
        interrupted before they fail: so all of those tries count that ended in the same words. Who is no longer active
        counts no longer.
        """
        incident = self.running
        if incident is None or not is_mistake(incident.culprit.cause, incident.culprit.detail):
            return False
        same = incident.same_workers | (self._same_workers if incident.follows(self._last_words) else set())
        failed = {worker for worker in same if is_active(*worker)}
        is_everywhere = len(failed) >= max(world_size, 1)
        if has_given_up(incident.culprit.cause, incident.culprit.detail):
            return is_everywhere
        return is_everywhere or len({uid for uid, _rank in failed}) > 1

    @property
    def num_barren(self) -> int:
        """Recoveries in a row, the running one included, that the script may have caused, without progress."""
        return self._num_barren if self.running is None else self._count_barren(self.running)

    def _count_barren(self, incident: Incident) -> int:
        num_barren = self._num_barren if incident.is_barren else 0
        return num_barren + (incident.culprit.cause in SCRIPT_CAUSES)

    def who_failed(self, num_tries: int) -> frozenset[str]:
        """Return which pods ended so many plans, without progress since the first of them; none: not only they.

        The plan of the running recovery is the last one. One that ended by what says nothing of a pod is passed over.
        """
        incident = self.running
        if incident is None or not incident.faults:
            return frozenset()
        before = self._tries if incident.is_barren else ()
        if len(before) + incident.num_tries < num_tries:
            return frozenset()  # The usual case, for which nothing is put together.
        last = [failed for failed in (*before, *incident.tries) if failed][-num_tries:]
        is_another = not incident.tries[-1] or len(last) < num_tries
        return frozenset() if is_another else frozenset().union(*last)

    @property
    def num_same(self) -> int:
        """Recoveries in a row, the running one included, from the same fault of the script without progress."""
        return self._num_same if self.running is None else self._count_same(self.running)

    @property
    def num_again(self) -> int:
        """Recoveries since the last progress, the running one included, from its fault of the script, in a row or not.

        Where ranks fail of one thing in words of their own, who is first says another fault each time.
        """
        incident = self.running
        if incident is None or incident.culprit.cause not in SCRIPT_CAUSES:
            return 0
        return 1 + (self._num_of_words[incident.words] if incident.is_barren else 0)

    def _note_words(self, incident: Incident) -> None:
        if not incident.is_barren:
            self._num_of_words.clear()
        is_known = incident.words in self._num_of_words or len(self._num_of_words) < _MAX_MISTAKES
        if is_known and incident.culprit.cause in SCRIPT_CAUSES:
            self._num_of_words[incident.words] += 1

    def _count_same(self, incident: Incident) -> int:
        return incident.num_same(self._last_words, self._num_same)

    @property
    def was_renewed(self) -> bool:
        """Whether a process was given up since the running recovery's fault came the first of these times in a row."""
        return self.running is not None and self._renewed_in >= self._first_in_a_row(self.running)

    def _first_in_a_row(self, incident: Incident) -> int:
        return self._began_in_a_row if incident.follows(self._last_words) else incident.number

    @property
    def culprits(self) -> frozenset[tuple[str, int | None]]:
        """Return the pods and local ranks whose fault the recoveries in a row from the same one were."""
        return frozenset() if self.running is None else self._culprits_with(self.running)

    def _culprits_with(self, incident: Incident) -> frozenset[tuple[str, int | None]]:
        before = self._culprits if incident.follows(self._last_words) else frozenset()
        return before | {(incident.culprit.pod_uid, incident.culprit.local_rank)}

    def note_renewal(self) -> None:
        """Note that the culprit's process is given up since its fault came back."""
        if self.running is not None:
            self._renewed_in = self.running.number

    def close(self, now_s: float) -> None:
        """End the running recovery, since all active workers run again, and count it, once.

        Where no plan of this coordinator led there, another one did, and counted it.
        """
        incident = self.running
        if incident is not None and incident.rung is not None:
            incident.finish(now_s)
            self.by_rung[incident.rung] += 1
            self.by_cause[incident.culprit.cause] += 1
        self.abandon()

    def abandon(self) -> None:
        """Put the running recovery among the finished ones. Unless it was closed, it does not count as a recovery."""
        incident = self.running
        if incident is None:
            return
        self.num_changes += 1
        self._num_barren, self._num_same = self._count_barren(incident), self._count_same(incident)
        self._note_words(incident)
        self._tries = ((*self._tries, *incident.tries) if incident.is_barren else incident.tries)[-_MAX_TRIES:]
        before = self._same_workers if incident.follows(self._last_words) else set()
        self._same_workers = incident.same_workers | before
        self._began_in_a_row, self._culprits = self._first_in_a_row(incident), self._culprits_with(incident)
        self._last_words = incident.words
        self.finished.append(incident)
        self.running = None

    def to_messages(self, wall: Callable[[float], str]) -> tuple[Recovery, ...]:
        """Return the newest recoveries, the running and the abandoned ones included, newest last."""
        incidents = [*self.finished, *([self.running] if self.running is not None else [])]
        return tuple(incident.to_message(wall) for incident in incidents[-MAX_RECOVERIES:])
