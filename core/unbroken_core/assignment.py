"""Who is which active rank: a pure function of the topology, the workers that are ready, and the plan before.

Ranks are held in slots: runs of consecutive active ranks of one pod. The first plan lines whole pods up in the order of
the tree. Afterwards survivors keep their places in the line; a slot whose pod is lost passes, local rank by local rank,
to a whole spare pod: to a whole spare domain when a whole domain was lost, else to the nearest one. Slots without a
spare are closed: those behind move up. Where pods may be split, single spare workers fill single gaps, too. At last,
spare pods line up behind the others while the job has fewer ranks than it wants.

The world's limits cut the end of the line. The line itself remembers who was cut off, so that each assignment starts
from all that is healthy, and the world grows again as soon as it can.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import NamedTuple, Union

from unbroken_core.renumber import divisible_active_world_size, max_active_world_size
from unbroken_core.settings import JobSettings, Layer
from unbroken_core.topology import Path, SparePool, Topology

Locals = tuple[int, ...]


class Slot(NamedTuple):
    """A run of consecutive active ranks that one pod holds."""

    pod_uid: str
    local_ranks: Locals


@dataclass(frozen=True)
class Rules:
    """What the assignment must keep to."""

    replicas: int
    minimum_replicas: int
    ranks_per_pod: int
    minimum_ranks_per_pod: int
    max_ranks: int | None
    divisible_by: int
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, settings: JobSettings) -> "Rules":
        """Return the rules of a job."""
        return cls(
            settings.replicas,
            settings.minimum_replicas,
            settings.ranks_per_pod,
            settings.minimum_ranks_per_pod,
            settings.max_ranks,
            settings.divisible_by,
            settings.layers,
        )

    @property
    def may_split(self) -> bool:
        """Whether a pod may stay in the world without all of its workers."""
        return self.minimum_ranks_per_pod < self.ranks_per_pod

    @property
    def wanted_ranks(self) -> int:
        """Active ranks of a job in full health."""
        return self.world_size(self.replicas * self.ranks_per_pod)

    def world_size(self, num_ranks: int) -> int:
        """Return how many of so many healthy ranks may be active; computed from the healthy count each time."""
        size = max_active_world_size(num_ranks, self.replicas * self.ranks_per_pod, self.max_ranks)
        return divisible_active_world_size(num_ranks, size, self.divisible_by)


@dataclass(frozen=True)
class Assignment:
    """The line of slots and how much of it is active."""

    slots: tuple[Slot, ...]
    world_size: int
    """The first so many places of the line are active ranks 0..world_size-1; the rest was cut off by the limits."""
    promoted: tuple[str, ...] = ()
    """Pods that got ranks and had none in the assignment before, in rank order; empty in a first assignment."""
    num_closed: int = 0
    """How many active ranks fewer than in the assignment before."""

    def active(self) -> Iterator[Slot]:
        """Yield the active part of each slot in rank order."""
        left = self.world_size
        for slot in self.slots:
            if left <= 0:
                return
            yield slot if len(slot.local_ranks) <= left else Slot(slot.pod_uid, slot.local_ranks[:left])
            left -= len(slot.local_ranks)

    def ranks_by_pod(self) -> dict[str, dict[int, int]]:
        """Return local rank to active rank for each pod with active ranks, in rank order."""
        found: dict[str, dict[int, int]] = {}
        rank = 0
        for pod_uid, local_ranks in self.active():
            held = found.setdefault(pod_uid, {})
            for local_rank in local_ranks:
                held[local_rank] = rank
                rank += 1
        return found


@dataclass(frozen=True)
class Shortage:
    """No valid world can be made of what is ready."""

    num_pods: int
    """Pods that could be active."""
    num_ranks: int
    detail: str
    """Why, with numbers, to end a sentence."""


Outcome = Union[Assignment, Shortage]


def assign_first(topology: Topology, rules: Rules, ready: Mapping[str, Locals], preferred: Set[str]) -> Outcome:
    """Return the first assignment: `preferred` pods before others, each in the order of the tree.

    `ready` has the local ranks of the workers that are ready, by pod uid; every such pod has a place in the tree.
    """
    fit = healthy(topology, rules, ready)
    order = topology.ordered(fit)
    capacity = _Capacity(topology, rules.layers, ())
    chosen: dict[str, Locals] = {}
    for pod_uid in sorted(order, key=lambda uid: uid not in preferred):
        if len(chosen) == rules.replicas:
            break
        room = capacity.room(pod_uid, len(fit[pod_uid]))
        if room >= rules.minimum_ranks_per_pod:
            chosen[pod_uid] = fit[pod_uid][:room]
            capacity.add(pod_uid, room)
    return _finish(rules, [Slot(uid, chosen[uid]) for uid in order if uid in chosen])


def assign_next(
    topology: Topology,
    rules: Rules,
    ready: Mapping[str, Locals],
    previous: Assignment,
    *,
    may_promote: bool,
    may_grow: bool = False,
) -> Outcome:
    """Return the assignment after `previous`.

    Lost ranks go to spares only with `may_promote`; a world that has shrunk takes in what is ready with either.
    """
    fit = healthy(topology, rules, ready)
    slots = previous.slots if rules.may_split else _whole_slots(previous.slots, rules.ranks_per_pod)
    line = _Line(topology, rules, fit, slots)
    if may_promote:
        line.replace_domains()
        line.replace_pods()
        if rules.may_split:
            line.replace_workers()
    line.close_gaps()
    if may_promote or may_grow:
        line.grow()
    return line.finish(previous)


def healthy(topology: Topology, rules: Rules, ready: Mapping[str, Locals]) -> dict[str, Locals]:
    """Return the ready pods without those that step aside: too few workers in the pod, or in one of its domains."""
    fit = {uid: locals_ for uid, locals_ in ready.items() if len(locals_) >= rules.minimum_ranks_per_pod}
    for depth in range(len(rules.layers), 0, -1):
        minimum = rules.layers[depth - 1].min_ranks
        if minimum <= 1:
            continue
        num_ranks: dict[Path, int] = {}
        for uid, locals_ in fit.items():
            prefix = topology.path(uid)[:depth]
            num_ranks[prefix] = num_ranks.get(prefix, 0) + len(locals_)
        fit = {uid: locals_ for uid, locals_ in fit.items() if num_ranks[topology.path(uid)[:depth]] >= minimum}
    return fit


class _Capacity:
    """Active ranks of each domain whose layer has a maximum."""

    def __init__(self, topology: Topology, layers: tuple[Layer, ...], slots: Iterable[Slot]) -> None:
        self._topology = topology
        self._limits = [
            (depth, layer.max_ranks) for depth, layer in enumerate(layers, start=1) if layer.max_ranks is not None
        ]
        self._num_ranks: dict[Path, int] = {}
        if self._limits:
            for slot in slots:
                self.add(slot.pod_uid, len(slot.local_ranks))

    def room(self, pod_uid: str, wanted: int) -> int:
        """Return how many of the wanted ranks fit into all domains of the pod."""
        path = self._topology.path(pod_uid)
        free = (limit - self._num_ranks.get(path[:depth], 0) for depth, limit in self._limits)
        return max(min((wanted, *free)), 0)

    def add(self, pod_uid: str, num_ranks: int) -> None:
        """Count active ranks of the pod."""
        path = self._topology.path(pod_uid)
        for depth, _limit in self._limits:
            self._num_ranks[path[:depth]] = self._num_ranks.get(path[:depth], 0) + num_ranks


class _Line:
    """The line of slots while it is repaired; a lost slot keeps its old holder until it finds a new one."""

    def __init__(self, topology: Topology, rules: Rules, fit: dict[str, Locals], slots: tuple[Slot, ...]) -> None:
        self._topology = topology
        self._rules = rules
        self._fit = fit
        self._slots: list[tuple[Slot, ...]] = [(slot,) for slot in slots]
        self._lost: dict[int, None] = dict.fromkeys(index for index, slot in enumerate(slots) if not _holds(fit, slot))
        self._holders = {slot.pod_uid for index, slot in enumerate(slots) if index not in self._lost}
        known = {slot.pod_uid for slot in slots}
        whole = (uid for uid, locals_ in fit.items() if len(locals_) == rules.ranks_per_pod and uid not in known)
        self._pool = SparePool(topology, whole)
        # Healthy workers of a lost slot hold their ranks until a whole pod takes the slot.
        held = (slot if index not in self._lost else self._survivors(slot) for index, slot in enumerate(slots))
        self._capacity = _Capacity(topology, rules.layers, held)
        self._num_filled = 0

    def replace_domains(self) -> None:
        """Give the slots of each domain that is lost as a whole (two pods or more) to a whole spare domain."""
        for depth in range(1, self._topology.num_layers + 1):
            groups: dict[Path, list[int]] = {}
            for index in self._lost:
                path = self._topology.path(self._slots[index][0].pod_uid)
                if len(path) >= depth and path[depth - 1] is not None:
                    groups.setdefault(path[:depth], []).append(index)
            for prefix, indices in groups.items():
                if len(indices) < 2 or self._is_used(prefix):
                    continue
                takers = self._pool.nearest_domain(prefix, len(indices), self._is_free_domain)
                for index, uid in zip(indices, takers, strict=False):
                    self._pool.take(uid)
                    self._fill(index, uid)

    def replace_pods(self) -> None:
        """Give each lost slot to the nearest whole spare pod."""
        for index in list(self._lost):
            if not len(self._pool):
                return
            slot = self._slots[index][0]
            uid = self._pool.take_nearest(self._topology.path(slot.pod_uid), self._has_room(len(slot.local_ranks)))
            if uid is not None:
                self._fill(index, uid)

    def replace_workers(self) -> None:
        """Keep the healthy workers of split pods, and fill single gaps with single spare workers, nearest first."""
        free = self._free_workers()
        for index in list(self._lost):
            slot = self._slots[index][0]
            alive = self._fit.get(slot.pod_uid, ())
            places: list[tuple[str, int]] = []
            for local_rank in slot.local_ranks:
                if local_rank in alive:
                    places.append((slot.pod_uid, local_rank))
                    continue
                taker = self._take_worker(free, slot.pod_uid, local_rank)
                if taker is not None:
                    places.append(taker)
            self._slots[index] = _runs(places)
            for uid, _local in places:
                self._holders.add(uid)
            if len(places) == len(slot.local_ranks):
                del self._lost[index]

    def close_gaps(self) -> None:
        """Leave out who found nobody; in split pods the healthy workers stay."""
        for index in self._lost:
            kept: list[tuple[str, int]] = []
            for slot in self._slots[index]:
                alive = self._fit.get(slot.pod_uid, ())
                kept += [(slot.pod_uid, local_rank) for local_rank in slot.local_ranks if local_rank in alive]
            may_stay = self._rules.may_split
            self._slots[index] = _runs(kept) if may_stay else ()
            if may_stay:
                self._holders.update(uid for uid, _local in kept)

    def grow(self) -> None:
        """Line spares up behind the others while there are fewer ranks than wanted."""
        wanted = self._rules.replicas * self._rules.ranks_per_pod
        missing = wanted - sum(len(slot.local_ranks) for group in self._slots for slot in group)
        for uid in self._pool:
            size = len(self._fit[uid])
            if missing < size:
                break
            if self._capacity.room(uid, size) == size:
                self._pool.take(uid)
                self._capacity.add(uid, size)
                self._slots.append((Slot(uid, self._fit[uid]),))
                missing -= size
        if self._rules.may_split and missing > 0:
            self._grow_by_workers(missing)

    def finish(self, previous: Assignment) -> Outcome:
        """Return the assignment."""
        slots = [slot for group in self._slots for slot in group if slot.local_ranks]
        outcome = _finish(self._rules, slots)
        if isinstance(outcome, Shortage):
            return outcome
        before = {slot.pod_uid for slot in previous.active()}
        promoted = dict.fromkeys(slot.pod_uid for slot in outcome.active() if slot.pod_uid not in before)
        closed = max(previous.world_size - outcome.world_size, 0)
        return replace(outcome, promoted=tuple(promoted), num_closed=closed)

    def _grow_by_workers(self, missing: int) -> None:
        free = self._free_workers()
        for uid in self._topology.ordered(free):
            room = self._capacity.room(uid, min(missing, len(free[uid])))
            if uid not in self._holders and room < self._rules.minimum_ranks_per_pod:
                continue
            if room > 0:
                self._slots.append((Slot(uid, tuple(sorted(free[uid])[:room])),))
                self._capacity.add(uid, room)
                missing -= room

    def _free_workers(self) -> dict[str, list[int]]:
        used: dict[str, set[int]] = {}
        for group in self._slots:
            for slot in group:
                used.setdefault(slot.pod_uid, set()).update(slot.local_ranks)
        free = {uid: [rank for rank in locals_ if rank not in used.get(uid, ())] for uid, locals_ in self._fit.items()}
        return {uid: ranks for uid, ranks in free.items() if ranks}

    def _take_worker(self, free: dict[str, list[int]], lost_uid: str, local_rank: int) -> tuple[str, int] | None:
        path = self._topology.path(lost_uid)
        for depth in range(len(path), -1, -1):
            near = self._topology.pods_under(path[:depth])
            found = [uid for uid in free if uid in near and self._capacity.room(uid, 1)]
            if not found:
                continue
            uid = min(self._topology.ordered(found), key=lambda pod: (pod != lost_uid, local_rank not in free[pod]))
            chosen = local_rank if local_rank in free[uid] else free[uid][0]
            free[uid].remove(chosen)
            if not free[uid]:
                del free[uid]
            self._capacity.add(uid, 1)
            return uid, chosen
        return None

    def _survivors(self, slot: Slot) -> Slot:
        alive = self._fit.get(slot.pod_uid, ()) if self._rules.may_split else ()
        return Slot(slot.pod_uid, tuple(local_rank for local_rank in slot.local_ranks if local_rank in alive))

    def _fill(self, index: int, uid: str) -> None:
        lost = self._slots[index][0]
        slot = Slot(uid, lost.local_ranks)
        self._slots[index] = (slot,)
        self._capacity.add(lost.pod_uid, -len(self._survivors(lost).local_ranks))
        self._capacity.add(uid, len(slot.local_ranks))
        self._holders.add(uid)
        del self._lost[index]

    def _has_room(self, num_ranks: int) -> Callable[[str], bool]:
        return lambda uid: self._capacity.room(uid, num_ranks) == num_ranks

    def _is_used(self, prefix: Path) -> bool:
        return any(uid in self._holders for uid in self._topology.pods_under(prefix))

    def _is_free_domain(self, prefix: Path, takers: list[str]) -> bool:
        size = self._rules.ranks_per_pod
        return not self._is_used(prefix) and all(self._capacity.room(uid, size) == size for uid in takers)


def _finish(rules: Rules, slots: list[Slot]) -> Outcome:
    num_ranks = sum(len(slot.local_ranks) for slot in slots)
    num_pods = len({slot.pod_uid for slot in slots})
    world_size = rules.world_size(num_ranks)
    if num_pods < rules.minimum_replicas:
        return Shortage(num_pods, num_ranks, f"{num_pods} healthy pods of at least {rules.minimum_replicas}")
    if world_size < 1:
        return Shortage(num_pods, num_ranks, f"{num_ranks} healthy ranks, a multiple of {rules.divisible_by} is wanted")
    return Assignment(tuple(slots), world_size)


def _holds(fit: Mapping[str, Locals], slot: Slot) -> bool:
    alive = fit.get(slot.pod_uid, ())
    # Nearly always both are the same tuple: a whole pod.
    return alive == slot.local_ranks or all(local_rank in alive for local_rank in slot.local_ranks)


def _whole_slots(slots: tuple[Slot, ...], ranks_per_pod: int) -> tuple[Slot, ...]:
    """Return one whole slot a pod: a plan that was taken over may know only a part of the last pod."""
    if all(len(slot.local_ranks) == ranks_per_pod for slot in slots):
        return slots
    return tuple(Slot(uid, tuple(range(ranks_per_pod))) for uid in dict.fromkeys(slot.pod_uid for slot in slots))


def _runs(places: list[tuple[str, int]]) -> tuple[Slot, ...]:
    runs: list[tuple[str, list[int]]] = []
    for uid, local_rank in places:
        if runs and runs[-1][0] == uid:
            runs[-1][1].append(local_rank)
        else:
            runs.append((uid, [local_rank]))
    return tuple(Slot(uid, tuple(ranks)) for uid, ranks in runs)
