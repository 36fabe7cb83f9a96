"""Tests of pods with each other (health.preflight.pairs): who tests with whom, in rounds, and what follows from it.

    ready pods ──pairs of a round──> PairOrder to both ──PairState of both, or late──> next round ... ──> findings

Before the first plan all ready pods that take tests are in one flight; the plan waits for it, for as long again as a
pod may test itself. While the job trains, a pod without ranks that has joined is in one with others that have none.
No pod with ranks ever is. What was not tested is unknown. Who tests with whom, and who is named, is `preflight`'s.
"""

import itertools
import math
from collections.abc import Iterable

from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.pair_table import Flight
from unbroken_core.coordinator.state.phases import Forming, Running
from unbroken_core.coordinator.state.places import Member
from unbroken_core.preflight.judging import Diagnosis, HostVerdict, Named, Why, judge
from unbroken_core.preflight.pairing import next_round
from unbroken_core.preflight.trials import HostState, Pair, Trial, pair_of
from unbroken_core.protocol.messages import PairOrder, PairState
from unbroken_core.protocol.settings import HealthMode
from unbroken_core.recovery.health import preflight_strike_of
from unbroken_core.vocabulary.findings import PAIRS, Finding, Verdict
from unbroken_core.vocabulary.plurals import counted

PAIR_S = 15.0
"""One test may take so long; what has not ended then has failed. A collective that hangs is what a bad link looks like,
and a node that is busy for a while is not: nobody is named for fewer than four tests."""
GRACE_S = 5.0
"""Beyond that: for a pod to say so."""
MOST_PARTNERS = 3
"""Pods without ranks that test with one that has joined: two may name it, and the third may be missing."""
MOST_LINKS = 4
"""Links of one pod that are told."""
_MOST_MESSAGE = 300


def receive_pairs(job: JobState, member: Member, said: PairState | None, now_s: float) -> None:
    """Note what a pod says of its tests; None: nothing new."""
    if said is None or not job.settings.preflight_pairs:
        return
    if job.pairs.note(member.uid, said):
        _note_unknown(job, member.uid, "it got ranks, or its test process ended, before any test", now_s)


def settle_pairs(job: JobState, now_s: float) -> float:
    """Begin a flight, order its next round, or end it. Return when to look again."""
    table = job.pairs
    if not job.settings.preflight_pairs:
        return math.inf
    until_s = _until_s(job, now_s)
    while True:
        flight = table.flight
        if until_s is None or (flight is not None and now_s >= flight.until_s):
            if flight is not None:
                flight.close_round(is_cut=True)
                _end(job, flight, now_s)
                if until_s is None and not isinstance(job.phase, Forming):
                    table.try_again(flight.newcomers)
            return math.inf
        if flight is None:
            flight = _begin(job, until_s, now_s)
            if flight is None:
                return math.inf
        if flight.awaited and now_s < flight.due_s:
            return min(flight.due_s, flight.until_s)
        if not _advance(job, flight, now_s):
            _end(job, flight, now_s)


def forget_pairs(job: JobState, member: Member, now_s: float) -> None:
    """Forget what is known of the tests of a pod that is gone, and of its links."""
    if not job.settings.preflight_pairs:
        return
    job.pairs.note(member.uid, None)
    _note(job, member.uid, (), now_s)
    for uid in [uid for uid in job.health.worn if uid in job.health.pairs]:
        kept = tuple(each for each in job.health.pairs[uid] if each.entity != member.pod[:128])
        _note(job, uid, kept, now_s)


def _until_s(job: JobState, now_s: float) -> float | None:
    """Return until when pods may test with each other now; None: they may not."""
    phase = job.phase
    if isinstance(phase, Running):
        return now_s + job.settings.preflight_s
    if not isinstance(phase, Forming) or phase.pairs_until_s is None or now_s >= phase.pairs_until_s:
        return None
    if not job.pairs.is_open:
        job.pairs.is_open = True
        for uid in job.members.ready:
            said = job.pairs.said.get(uid)
            if said is None or not said.port:
                _note_unknown(job, uid, "it takes no tests with others", now_s)
    return phase.pairs_until_s


def _is_free(job: JobState, uid: str) -> bool:
    """Return whether a pod can test now: it waits for ranks, and takes tests."""
    member, said = job.members.by_uid.get(uid), job.pairs.said.get(uid)
    if member is None or member.session is None or member.out is not None or member.ranks:
        return False
    return said is not None and said.port > 0 and uid in job.members.ready


def _begin(job: JobState, until_s: float, now_s: float) -> Flight | None:
    table = job.pairs
    newcomers = [uid for uid in table.fresh if _is_free(job, uid)]
    if not newcomers:
        return None
    tested = (uid for uid in table.said if uid in table.tested and uid not in table.bad)
    others = [uid for uid in tested if _is_free(job, uid)]
    others.sort(key=lambda uid: (uid not in table.proven, job.members.by_uid[uid].pod))
    chosen = others[:MOST_PARTNERS]
    ordered = list(job.members.ranking.ordered({uid: job.members.by_uid[uid] for uid in (*newcomers, *chosen)}))
    numbers = {uid: number for number, uid in enumerate(ordered)}
    proven = [numbers[uid] for uid in chosen if uid in table.proven]
    flight = Flight(
        tuple(ordered),
        tuple(job.members.name(uid) for uid in ordered),
        frozenset(newcomers),
        [_state(job, uid) for uid in ordered],
        until_s,
        tuple(Trial(pair_of(*pair), True) for pair in itertools.pairwise(proven)),
    )
    table.begin(flight)
    return flight


def _state(job: JobState, uid: str) -> HostState:
    is_broken = preflight_strike_of(job.health.preflights.get(uid, ())) is not None
    return HostState.BROKEN if is_broken else HostState.ABLE


def _advance(job: JobState, flight: Flight, now_s: float) -> bool:
    """Close the round that is over, and order the next one; return whether there is one."""
    flight.close_round()
    for host, uid in enumerate(flight.uids):
        if flight.states[host] is HostState.ABLE and not _is_free(job, uid):
            flight.states[host] = HostState.SILENT
    found = next_round(flight.states, (*flight.seeds, *flight.trials), flight.round)
    if found is None:
        return False
    flight.round, flight.due_s = found.number, now_s + PAIR_S + GRACE_S
    job.pairs.num_settled += 1
    for pair in found.pairs:
        _order(job, flight, pair)
    return True


def _order(job: JobState, flight: Flight, pair: Pair) -> None:
    table, term = job.pairs, job.numbers.term
    table.number += 1
    place, partner = (table.said[flight.uids[host]] for host in pair)
    gpus = min(place.gpus, partner.gpus)
    flight.expect(pair, term, table.number)
    for side, host in enumerate(pair):
        order = PairOrder(term, table.number, side, place.host, place.port, gpus, PAIR_S)
        job.send(job.members.by_uid[flight.uids[host]], order)


def _end(job: JobState, flight: Flight, now_s: float) -> None:
    """Say what the tests have found. What had not ended says nothing."""
    table = job.pairs
    table.end()
    diagnosis = judge(flight.states, (*flight.seeds, *flight.trials))
    found = _links_of(flight, diagnosis)
    for verdict in diagnosis.hosts:
        uid = flight.uids[verdict.host]
        if uid not in job.members.by_uid:
            continue
        # Who has passed with others before fails with few now: that may be the links, and few cannot tell.
        is_bad = verdict.named is Named.BAD and verdict.why is Why.PROVEN_PARTNERS and uid not in table.proven
        earlier = job.health.pairs.get(uid, ()) if uid not in flight.newcomers and not is_bad else ()
        own = tuple(each for each in earlier if not each.entity) or (_finding(flight, verdict),)
        links = (*found.get(verdict.host, ()), *(each for each in earlier if each.entity))
        if is_bad or verdict.why is Why.PASSED:
            table.name(uid, is_bad=is_bad)
        _note(job, uid, (*own, *links[:MOST_LINKS]), now_s)


def _finding(flight: Flight, verdict: HostVerdict) -> Finding:
    """Return what is said of one pod."""
    if verdict.why is Why.PASSED:
        num = len(verdict.passed)
        return Finding(PAIRS, "", Verdict.OK, message=f"passed {counted(num, 'test')} with other pods")
    partners = _names(flight, dict.fromkeys(verdict.failed))
    if verdict.named is Named.BAD and verdict.why is Why.PROVEN_PARTNERS:
        reasons = (flight.reasons.get(pair_of(verdict.host, partner), "") for partner in reversed(verdict.failed))
        last = next(filter(None, reasons), "")
        text = f"failed {counted(len(verdict.failed), 'test')} with {partners}, who pass with others"
        return Finding(PAIRS, "", Verdict.FATAL, message=(text + (f" ({last})" if last else ""))[:_MOST_MESSAGE])
    alone = "there was no other pod without ranks to test with, or no time"
    text = {
        Why.OWN_CHECKS: alone if verdict.named is Named.OK else "its own checks have failed: nobody tests with it",
        Why.SILENT: "it did not say how a test went",
        Why.NO_PAIR: alone,
        Why.ONE_OF_TWO: f"failed with {partners}: it may be either, or what is between them",
        Why.TOO_MANY: f"failed with {partners}, and more than half of the pods fail like this: look at what they share",
    }.get(verdict.why, f"failed with {partners}: not enough to name it")
    return Finding(PAIRS, "", Verdict.UNKNOWN, message=text[:_MOST_MESSAGE])


def _links_of(flight: Flight, diagnosis: Diagnosis) -> dict[int, list[Finding]]:
    """Return what is said of links, by number of a pod: of both ends, and it speaks against neither."""
    found: dict[int, list[Finding]] = {}
    for link in diagnosis.links:
        why = flight.reasons.get(link.pair, "")
        text = f"failed {counted(link.num_failed, 'test')} with each other" + (f" ({why})" if why else "")
        for host, other in (link.pair, reversed(link.pair)):
            name = flight.names[other][:128]
            found.setdefault(host, []).append(Finding(PAIRS, name, Verdict.SUSPECT, message=text[:_MOST_MESSAGE]))
    return found


def _names(flight: Flight, hosts: Iterable[int]) -> str:
    names = [flight.names[host] for host in hosts]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _note_unknown(job: JobState, uid: str, why: str, now_s: float) -> None:
    _note(job, uid, (Finding(PAIRS, "", Verdict.UNKNOWN, message=why),), now_s)


def _note(job: JobState, uid: str, findings: tuple[Finding, ...], now_s: float) -> None:
    job.health.note_pairs(uid, findings, now_s, may_fail=job.settings.preflight is HealthMode.ACT)
