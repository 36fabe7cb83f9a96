"""The pods of a job as the coordinator knows them, sorted by what they mean for the current iteration.

Every change of one pod costs O(its workers): the table sorts that pod anew and keeps sets, so that no event has to
look at all pods. A pod is changed by a verb of the table, which sorts it.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, MutableMapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from unbroken_core.coordinator.state.places import Member, WorkerPlace
from unbroken_core.protocol.messages import Plan, PodObservation, WorkerState
from unbroken_core.ranks.ranking import Ranking
from unbroken_core.ranks.rules import Rules
from unbroken_core.ranks.worlds import Cut, Locals
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

# A name of the module is found faster than a member of an Enum, and places are looked at by the ten thousand.
_RUNNING, _COMPLETED = WorkerPhase.RUNNING, WorkerPhase.COMPLETED


class Newcomers(NamedTuple):
    """Pods that get no ranks for a moment."""

    places: Mapping[str, Set[int]]
    """Local ranks by uid."""
    until_s: float
    """When the first of them is waited for no longer; inf without any."""


class _Health:
    """What the places of one member amount to; each is looked at once: thousands of pods may report at one instant."""

    __slots__ = (
        "has_lost_rank",
        "healthy",
        "is_broken",
        "is_hopeless",
        "is_lingering",
        "is_unsettled",
        "needs_order",
        "ready",
    )

    def __init__(self, member: Member) -> None:
        self.is_broken = self.is_unsettled = self.is_lingering = self.is_hopeless = self.needs_order = False
        self.has_lost_rank = False
        """Whether a place with a rank is among the broken ones: in an interruption that fault is known."""
        ready: list[int] = []
        healthy: list[int] = []
        for local_rank, place in member.places.items():
            if not place.is_sound:
                self.is_hopeless = self.is_hopeless or place.is_hopeless
                if place.is_dead:
                    self.is_broken = True
                    self.has_lost_rank = self.has_lost_rank or local_rank in member.ranks
                    self.needs_order = self.needs_order or place.needs_order
                    continue
            if place.has_left:
                ready.append(local_rank)
                healthy.append(local_rank)
            elif local_rank in member.ranks:
                self.is_unsettled = True
                healthy.append(local_rank)
            else:
                self.is_lingering = True
        is_usable = member.session is not None and member.out is None
        self.ready: Locals = tuple(ready) if is_usable else ()
        """Local ranks that can be given a rank now."""
        self.healthy: Locals = tuple(healthy) if is_usable else ()
        """Those that can keep or get a rank, if the iteration is interrupted and they leave it."""


@dataclass(frozen=True)
class ActiveWorld:
    """The plan in force."""

    planned_s: float
    """When it was cut, or taken over; when the coordinator began, before the first."""
    iteration: int = -1
    size: int = 0
    """Active ranks; 0 before the first plan."""
    num_spare_ranks: int = 0
    """Ready workers without a rank when it was cut."""


class Members:
    """All members, and sets of their uids by what the next decision asks for."""

    def __init__(self, rules: Rules, world: ActiveWorld) -> None:
        self.world = world
        self.num_changes = 0
        """Rises with everything that agents say, but for heartbeats, and with every pod that goes."""
        self.num_shifts = 0
        """Rises when it is other pods that have ranks, or could stand in for them: seldom, and not with what those that
        have ranks go through in a recovery."""
        self._moved: list[Member] = []
        """Members whose ranks changed in the last plan."""
        self._may_split = rules.may_split
        self._minimum_ranks_per_pod = rules.minimum_ranks_per_pod
        self.ranking = Ranking(rules)
        self.by_uid: dict[str, Member] = {}
        self.by_pod: dict[str, Member] = {}
        """By the names of their pods."""
        self.by_session: dict[str, Member] = {}
        # Ordered: the first of a dict is far to seek once many before it were taken out.
        self.heard: OrderedDict[str, None] = OrderedDict()
        """Connected members, the one that was silent for longest first."""
        self.absent: OrderedDict[str, str] = OrderedDict()
        """Names of the pods that the operator sees and that have not joined, by uid."""
        self._expected: Mapping[str, str] = {}
        self.unready: OrderedDict[str, None] = OrderedDict()
        """Members that are not ready."""
        self.away: dict[str, None] = {}
        self.ready: dict[str, Locals] = {}
        """Ready workers of each pod that could get ranks: enough of them are ready."""
        self.broken: dict[str, None] = {}
        """Pods with a worker that has no process, or a process that is still starting."""
        self.coming: dict[str, None] = {}
        """Pods with a worker without a rank that gets ready: it has yet to leave what it was told to leave, or its
        process is starting, and no other worker of the pod has a rank."""
        self.out: dict[str, None] = {}
        self.unfit: dict[str, None] = {}
        """Pods that are out for what their watches found."""
        self.hopeless: dict[str, None] = {}
        self.respawning: dict[str, None] = {}
        """Pods with a process to be started, for which the order was not given yet."""
        self.not_entered: OrderedDict[str, None] = OrderedDict()
        """Active pods with a worker that has not entered the current iteration."""
        self.not_completed: dict[str, None] = {}
        self.not_ended: dict[str, None] = {}
        """Active pods with a rank whose process has not ended well."""
        self.not_progressed: dict[str, None] = {}
        self.active: dict[str, None] = {}
        self.leaving: dict[str, None] = {}
        """Active pods that an interruption waits for: away, or with a rank that has not left what it was told.

        Pods without a process at a place with a rank are not waited for, unless pods may be split: their fault is
        known. One without a process at another place may be the culprit: it has yet to report, or to be lost."""
        self.lingering: OrderedDict[str, None] = OrderedDict()
        """Pods with a worker without a rank that has not left what it was told: nobody waits for it."""
        self.without_domain: OrderedDict[str, None] = OrderedDict()
        """Ready pods without ranks whose domains nobody has named, in a job with layers."""

    # ----------------------------------------------------------------------------------------------------- queries

    def name(self, uid: str) -> str:
        """Return the name of a member. Raises KeyError for any other pod."""
        return self.by_uid[uid].pod

    @property
    def num_living(self) -> int:
        """Pods that are or can become ready."""
        lost = {uid for uid in (*self.out, *self.hopeless) if uid not in self.ready}
        return len(self.by_uid) - len(lost)

    @property
    def num_given_up(self) -> int:
        """Places that get no process any more, in pods that are ready without them."""
        pods = (self.by_uid[uid] for uid in self.hopeless if uid in self.ready)
        return sum(place.is_hopeless and place.is_dead for pod in pods for place in pod.places.values())

    @property
    def hopeless_text(self) -> str:
        """How the processes of the first place that was given up have ended, for people; "" when there is none."""
        return next((text for uid in self.hopeless if (text := self.by_uid[uid].hopeless_text)), "")

    def newcomers(self, now_s: float, wait_s: float) -> Newcomers:
        """Return those that have just come and whose domains nobody has named yet.

        The operator names them soon after their agents have joined. Until then they would count as in the unknown
        domain, and could be one too many in the one that they are in.
        """
        new = [member for uid in self.without_domain if now_s < (member := self.by_uid[uid]).joined_at_s + wait_s]
        until_s = min((member.joined_at_s + wait_s for member in new), default=math.inf)
        return Newcomers({member.uid: member.places.keys() for member in new}, until_s)

    # ------------------------------------------------------------------------------------------------------- verbs

    def sort(self, member: Member) -> None:
        """Put one member into the sets where it belongs. Verbs do it themselves, but for `update`."""
        uid = member.uid
        is_known = uid in self.by_uid
        health = _Health(member)
        is_ready = is_known and len(health.ready) >= self._minimum_ranks_per_pod
        if is_ready:
            self.ready[uid] = health.ready
        else:
            self.ready.pop(uid, None)
        _put(self.unready, uid, is_known and not is_ready)
        is_placed = member.has_domains or bool(member.ranks) or self.ranking.num_layers == 0
        _put(self.without_domain, uid, is_ready and not is_placed)
        _put(self.out, uid, is_known and member.out is not None)
        _put(self.unfit, uid, is_known and bool(member.unfit))
        self._sort_health(member, health, is_known)
        self._sort_iteration(member)
        standing = _standing_of(member, is_known, is_ready)
        if member.standing != standing:
            member.standing = standing
            self.num_shifts += 1
        if is_known:
            self.ranking.fit(uid, health.healthy)

    def _sort_health(self, member: Member, health: _Health, is_known: bool) -> None:
        uid = member.uid
        is_away = is_known and member.session is None
        is_broken = is_known and health.is_broken
        is_lingering = is_known and health.is_lingering and member.out is None
        _put(self.away, uid, is_away)
        _put(self.broken, uid, is_broken)
        _put(self.hopeless, uid, is_known and health.is_hopeless)
        _put(self.lingering, uid, is_lingering)
        is_coming = is_lingering or (is_broken and not member.ranks and member.out is None)
        _put(self.coming, uid, is_coming)
        may_respawn = is_known and not is_away and member.out is None
        _put(self.respawning, uid, may_respawn and health.needs_order)
        is_waited_for = bool(member.ranks) and member.out is None and (self._may_split or not health.has_lost_rank)
        _put(self.leaving, uid, is_waited_for and (is_away or health.is_unsettled))

    def _sort_iteration(self, member: Member) -> None:
        uid, iteration = member.uid, self.world.iteration
        has_entered = has_completed = has_progressed = has_ended = True
        for local_rank in member.ranks:
            state = member.places[local_rank].state
            if not _is_in(state, iteration):
                has_entered = has_completed = has_progressed = has_ended = False
                break
            has_completed = has_completed and state.phase is _COMPLETED
            has_ended = has_ended and state.has_ended
            has_progressed = has_progressed and (state.has_progress or state.step >= 0)
        _put(self.active, uid, bool(member.ranks))
        _put(self.not_entered, uid, not has_entered)
        _put(self.not_completed, uid, not has_completed)
        _put(self.not_ended, uid, not has_ended)
        _put(self.not_progressed, uid, not has_progressed)

    def receive(self, member: Member, now_s: float) -> None:
        """Note that the member said something."""
        member.heard_at_s = now_s
        self.heard[member.uid] = None
        self.heard.move_to_end(member.uid)

    def follow(self, rules: Rules, keeps_domains: bool) -> None:
        """Rank by other rules from now on; the tree is new. Without `keeps_domains` nobody's domains are known."""
        self.num_shifts += 1
        previous, self.ranking = self.ranking, Ranking(rules)
        for member in self.by_uid.values():
            member.has_domains = member.has_domains and keeps_domains
            domains = previous.domains(member.uid) if member.has_domains else ()
            self.ranking.place(member.uid, member.pod, domains)
            self.ranking.fit(member.uid, _Health(member).healthy)

    def expect(self, names: Mapping[str, str]) -> None:
        """Note which pods there are: names by uid."""
        self._expected = names
        self.absent = OrderedDict(
            sorted(((uid, pod) for uid, pod in names.items() if uid not in self.by_uid), key=lambda item: item[1])
        )

    def connect(self, member: Member, session: str, now_s: float) -> None:
        """Bind a new or known member to a connection, and leave its old one. To be sorted afterwards."""
        self.num_changes += 1
        if member.session is not None:
            self.by_session.pop(member.session, None)
        self.by_uid[member.uid] = member
        self.by_pod[member.pod] = member
        self.absent.pop(member.uid, None)
        self.by_session[session] = member
        member.session = session
        member.seq = -1
        self.receive(member, now_s)

    def update(self, member: Member, states: tuple[WorkerState, ...], now_s: float, ran_since_s: float | None) -> None:
        """Take over what the agent says of its workers; what is older than known is ignored. To be sorted afterwards.

        `ran_since_s` is the instant of the last plan in jobs where READY says nothing about the script, else None.
        """
        self.num_changes += 1
        member.update(states, now_s, ran_since_s)

    def disconnect(self, member: Member, now_s: float) -> None:
        """Note that the member's connection is broken."""
        self._unbind(member, now_s)
        self.sort(member)

    def drop(self, member: Member) -> None:
        """Forget a member."""
        self._unbind(member, 0.0)
        del self.by_uid[member.uid]
        if self.by_pod.get(member.pod) is member:
            del self.by_pod[member.pod]
        if member.uid in self._expected:
            self.absent[member.uid] = self._expected[member.uid]
        member.seat({}, {})
        self.ranking.remove(member.uid)
        self.sort(member)

    def observe(self, member: Member, pod: PodObservation, names_domains: bool) -> None:
        """Take over what the operator sees of a pod; its domains too, unless the script names them."""
        member.gone = pod.gone
        member.node = pod.node or member.node
        if pod.domains and not names_domains:
            member.has_domains = True
            self.ranking.place(member.uid, member.pod, pod.domains)
        self.sort(member)

    def note_unfit(self, member: Member, why: str, cause: Cause = Cause.DEVICE_FAULT) -> None:
        """Note that a pod can have no ranks for what was found of it; "": that it can."""
        self.num_changes += 1
        member.unfit, member.unfit_cause = why, cause
        self.sort(member)

    def begin(self, world: ActiveWorld, cut: Cut) -> None:
        """Put a new world in force: members get its ranks, and are sorted when they are told. Others keep theirs."""
        self.world = world
        for member in self.by_uid.values() if cut.is_first else self._moved:
            member.seat({} if cut.is_first else member.ranks, {})
        self._moved = [self.by_uid[uid] for uid in cut.ranks if uid in self.by_uid]
        for member in self._moved:
            member.seat(cut.ranks[member.uid], cut.moves.get(member.uid, {}))

    def adopt(self, world: ActiveWorld, ranks: Mapping[str, dict[int, int]]) -> None:
        """Put a world in force that members are in already: local rank to rank by uid."""
        self.world = world
        for member in self.by_uid.values():
            member.seat(ranks.get(member.uid, {}), {})
            self.sort(member)

    def note_plan(self, member: Member, plan: Plan | None) -> None:
        """Note the plan that was sent to a member; None: it is away, and was sent none."""
        if plan is not None:
            member.plan = plan
            iteration, places = plan.iteration, member.places
            for local_rank in member.ranks:
                place = places[local_rank]
                place.told_iteration = iteration
                place.told_incarnation = place.planned_incarnation = place.state.incarnation
        self.sort(member)

    def believe(self, member: Member, place: WorkerPlace) -> None:
        """Note that a worker that says READY never was in the iteration that it was told to enter."""
        place.told_incarnation = -1
        self.sort(member)

    def believe_all(self, places: Iterable[tuple[Member, WorkerPlace]]) -> None:
        """Note that none of these ever was in it."""
        for member, place in places:
            self.believe(member, place)

    def mark_failed(self, member: Member, place: WorkerPlace) -> None:
        """Note that the process of a place is to be replaced."""
        if place.replacing is None:
            place.replacing = place.state.incarnation
            place.is_order_sent = False
        self.sort(member)

    def mark_all_failed(self, now_s: float) -> None:
        """Note that all processes are to be replaced at once, however often they ended; retired places stay so."""
        for member in self.by_uid.values():
            for place in member.places.values():
                place.num_short_lives, place.is_pointless = 0, False
                place.retry_at_s = now_s
                if not place.is_retired and place.replacing is None:
                    place.replacing = place.state.incarnation
                    place.is_order_sent = False
            self.sort(member)

    def note_respawn(self, member: Member, places: Iterable[WorkerPlace]) -> None:
        """Note that the agent was told to start processes at these places."""
        for place in places:
            place.replacing = place.state.incarnation if place.replacing is None else place.replacing
            place.is_order_sent = True
        self.sort(member)

    def count_fault(self, member: Member, place: WorkerPlace, num_faults: int, limit: int) -> None:
        """Note how many faults a place had; with more than the limit it gets no further process."""
        place.num_faults = num_faults
        place.is_retired = num_faults > limit
        self.sort(member)

    def _unbind(self, member: Member, now_s: float) -> None:
        self.num_changes += 1
        if member.session is not None:
            del self.by_session[member.session]
        member.session = None
        member.away_since_s = now_s
        self.heard.pop(member.uid, None)


def _is_in(state: WorkerState, iteration: int) -> bool:
    return state.iteration == iteration and (state.phase is _RUNNING or state.phase is _COMPLETED)


def _standing_of(member: Member, is_known: bool, is_ready: bool) -> tuple[object, ...]:
    """Return what it changes whether ranks can move from this pod or another, or to it."""
    spare: tuple[object, ...] = ()
    if is_ready and not member.ranks:
        spare = (member.has_domains, member.joined_at_s, *[place.state.phase for place in member.places.values()])
    return (is_known, len(member.ranks), member.out, bool(member.unfit), spare)


def _put(pods: MutableMapping[str, None], uid: str, is_member: bool) -> None:
    if is_member:
        pods[uid] = None
    else:
        pods.pop(uid, None)
