"""Checkpoints in memory in virtual time: keepers, their slots, and what every restore must be.

    enter ──load──> steps ──save: begin, seal, verify on each rank──> steps ──save──> ...
              │ the plan's candidates, in order: the first that all ranks can read

The content of a slot is the *state* of the training: a chain of all iterations and steps that led to it. So a state of
two timelines, or of two steps, is another one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.invariants import Violation

from unbroken_core.coordinator.copying import KEEPERS_AWAITED_S
from unbroken_core.coordinator.memory.table import StepKey
from unbroken_core.protocol.messages import Buddies, Plan
from unbroken_core.vocabulary.checkpoints import MAX_LOADS, Candidate, Copy, Held, Holding, Load, LoadSource, Restore
from unbroken_core.vocabulary.reasons import JobPhase, WorkerPhase

if TYPE_CHECKING:
    from tests.simulation.pod import Pod, Worker
    from tests.simulation.world import World

    from unbroken_core.coordinator.coordinator import Coordinator

CALM_SAVE_S = 60.0
"""Between two saves of a job that nothing disturbs until its end."""
_SKIPPED = -1
"""In the place of ranks that have yet to save: some rank has skipped the step."""
State = tuple[tuple[int, int, int], ...]
"""(iteration, term, step) of each stretch of the training, oldest first."""


@dataclass(frozen=True)
class Slot:
    """One slot, as its head says, and its content."""

    key: StepKey
    rank: int
    state: State
    is_sealed: bool = False
    is_verified: bool = False
    is_spoiled: bool = False
    """Its content is not what was sealed, and nobody knows yet."""


@dataclass
class Keeper:
    """A pod's memory: it outlives worker and agent, and ends with the pod, unless pods share a host."""

    uid: str
    slots: dict[tuple[int, int], Slot] = field(default_factory=dict)
    """By local rank and index."""
    kept: dict[int, int] = field(default_factory=dict)
    loads: tuple[Load, ...] = ()
    copies: dict[tuple[str, int], list[Slot]] = field(default_factory=dict)
    """By owner and rank: at most two."""
    buddies: Buddies | None = None

    def target(self, local_rank: int, key: StepKey) -> int | None:
        """Return which slot the next save goes into; None: it is skipped.

        Never the one that was sealed or restored last, unless the other one is protected.
        """
        index = 1 - self.kept.get(local_rank, 1)
        older, newer = self.slots.get((local_rank, index)), self.slots.get((local_rank, 1 - index))
        protected, following = self.pins
        if older is None or not older.is_sealed or older.key not in self.pins:
            return index
        is_kept = newer is not None and newer.key in self.pins
        return None if older.key == following or older.key != protected or is_kept or key.step % 2 else 1 - index

    @property
    def pins(self) -> tuple[StepKey | None, StepKey | None]:
        """The protected step and the next one, as the coordinator says."""
        told = (None, None) if self.buddies is None else (self.buddies.protected, self.buddies.next_protected)
        protected, following = (None if key is None else StepKey(*key) for key in told)
        return protected, following

    def find(self, key: StepKey, rank: int) -> Slot | None:
        """Return a sealed slot."""
        return next((s for s in self.all() if s.is_sealed and s.key == key and s.rank == rank), None)

    def all(self) -> Iterator[Slot]:
        """Yield own slots, then copies."""
        yield from self.slots.values()
        for slots in self.copies.values():
            yield from slots

    def keep(self, owner: Keeper, slot: Slot) -> None:
        """Take a copy; what is pinned stays, and of two the newer one that is not void."""
        slots = self.copies.setdefault((owner.uid, slot.rank), [])
        sound = [one for one in slots if not any(load.voids(*one.key[:3]) for load in owner.loads)]
        if any(one.key >= slot.key for one in sound) and slot.key not in self.pins:
            return
        slots[:] = [one for one in slots if one.key != slot.key]
        if len(slots) > 1:
            free = [one for one in slots if one.key not in self.pins or one not in sound]
            if not free:
                return
            slots.remove(min(free, key=lambda one: (one in sound, one.key)))
        slots.append(slot)


class Memory:
    """All keepers of a job, and what is known to be true of them."""

    def __init__(self, world: World) -> None:
        schedule = world.schedule
        self.world = world
        self.kind = schedule.memory
        self.random = random.Random(f"memory {schedule.seed}")
        self.keepers: dict[str, Keeper] = {}
        self.states: dict[int, tuple[StepKey | None, State]] = {}
        """By iteration: what it began with, and the state then."""
        self.restores: dict[tuple[int, int], tuple[Candidate, ...] | None] = {}
        """Candidates that the pods of a plan were told, by iteration and term."""
        self.committed: dict[tuple[int, int], StepKey] = {}
        """Newest step that all ranks have sealed, by iteration and term."""
        self.tried: dict[tuple[int, int], int] = {}
        """Newest step that any rank was to save, by iteration and term."""
        self.num_skipped = 0
        self.sealed: set[tuple[str, StepKey, int]] = set()
        """(pod, step, rank) of all that was ever sealed, and below verified."""
        self.verified: set[tuple[StepKey, int]] = set()
        self.num_copied = self.num_fetched = self.num_kept_promises = 0
        self.promise: tuple[StepKey, dict[int, set[str]]] | None = None
        """What was called protected last while the job ran, and who had which shard."""
        self.told: dict[str, frozenset[tuple[StepKey, int]]] = {}
        """Copies of which a pod has last told any rendezvous, as (step, rank)."""
        self.num_restored = self.num_chosen_again = self.num_lost = self.num_checked = self.num_later = 0

    @property
    def is_on(self) -> bool:
        """Whether the job has memory for checkpoints."""
        return self.kind != "none"

    def keeper(self, pod: Pod) -> Keeper:
        """Return a pod's keeper."""
        return self.keepers.setdefault(pod.uid, Keeper(pod.uid))

    def held(self, pod: Pod) -> Held | None:
        """Return what the pod's agent tells."""
        if not self.is_on or (self.kind == "older agents" and pod.name.endswith("1")):
            return None
        keepers = [self.keeper(pod)]
        if self.kind == "host":
            living = {other.uid for other in self.world.pods.values() if other.is_alive}
            keepers += [keeper for uid, keeper in self.keepers.items() if uid not in living]
        held = Held(self._arena(pod.uid), tuple(h for keeper in keepers for h in _holdings(keeper)), keepers[0].loads)
        if self.kind != "copies":
            return held
        pinned = tuple(key for key in keepers[0].pins if key is not None)
        return replace(held, copies=_copies(keepers[0]), host="10.0.0.1", port=1, pinned=pinned)

    def note_told(self, pod: Pod, held: Held | None) -> None:
        """Note of which copies a rendezvous has heard: what lies with a pod that is cut off nobody can name."""
        if held is not None:
            self.told[pod.uid] = frozenset(
                (StepKey(copy.iteration, copy.term, copy.step, copy.world_size), rank)
                for copy in held.copies
                for rank, _layout, _data in copy.shards
            )

    # -------------------------------------------------------------------------------------------------------- copies

    def hear(self, pod: Pod, buddies: Buddies) -> None:
        """The coordinator says who keeps whose copies: a keeper drops what it may, and sends what others lack."""
        keeper = self.keeper(pod)
        if self.kind != "copies":
            raise Violation(f"{pod.name} is told of buddies, and keeps no copies")
        if set(buddies.drop) & set(buddies.owners):
            raise Violation(f"{pod.name} is told to keep and to drop copies of the same pod")
        if keeper.buddies is not None and buddies.term < keeper.buddies.term:
            return
        keeper.buddies = buddies
        for place in [place for place in keeper.copies if place[0] in buddies.drop]:
            del keeper.copies[place]
        for slot in list(keeper.slots.values()):
            if slot.is_verified:
                self._send_copies(pod, slot)
        self.world.after(self.random.uniform(0.0, 0.05), pod.report, "")

    def _send_copies(self, pod: Pod, slot: Slot) -> None:
        buddies = self.keeper(pod).buddies
        for peer in () if buddies is None else buddies.keepers:
            delay_s = self.random.choice([0.05, 0.5, 8.0]) * self.random.random()
            self.world.after(delay_s, partial(self._copied, pod, peer.uid, slot), "")

    def _copied(self, pod: Pod, uid: str, slot: Slot) -> None:
        """A copy is whole, if its holder still wants it, and its owner still has it."""
        holder = next((one for one in self.world.pods.values() if one.uid == uid and one.is_alive), None)
        owner, keeper = self.keepers.get(pod.uid), self.keepers.get(uid)
        if holder is None or owner is None or keeper is None or not pod.is_alive or keeper.buddies is None:
            return
        mine = next((one for one in owner.slots.values() if (one.key, one.rank) == (slot.key, slot.rank)), None)
        if pod.uid not in keeper.buddies.owners or mine is None or mine.is_spoiled:
            return
        if any(load.voids(*slot.key[:3]) for load in keeper.loads):
            return
        keeper.keep(owner, mine)
        self.num_copied += 1
        holder.report()

    def note_promise(self, coordinator: Coordinator) -> None:
        """Note what is called protected while the job runs, and who has it; a plan may make it a newer step."""
        job, phase = coordinator._job, coordinator.phase
        if self.kind != "copies" or phase not in (JobPhase.RUNNING, JobPhase.PLANNED):
            return
        key = job.copying.protected(job.checkpoints, job.settings.copies)
        if phase is JobPhase.PLANNED and (key is None or (self.promise is not None and key <= self.promise[0])):
            # A recovery is not over: what was said before still holds.
            return
        step = None if key is None else job.checkpoints.steps[key]
        places = {} if step is None else {rank: set(found) for rank, found in step.holders.items()}
        self.promise = None if key is None else (key, places)
        if key is not None and any((key, rank) not in self.verified for rank in range(key.world_size)):
            raise Violation(f"{key} is called protected, and not all ranks have verified it")

    def _check_promise(self, iteration: int, keys: tuple[StepKey, ...], given_up: list[StepKey]) -> None:
        """What was protected outlives the loss of as many pods as there are copies, unless all went on meanwhile."""
        coordinator = self.world.coordinator
        if self.promise is None or coordinator is None:
            return
        (key, places), job = self.promise, coordinator._job
        living = {pod.uid for pod in self.world.pods.values() if pod.is_alive}
        # One that has just ended may still count as cut off.
        holders, heard = set().union(*places.values()), job.members.by_uid.keys() & living
        if any(job.members.by_uid[uid].joined_at_s > self.world.now_s - KEEPERS_AWAITED_S for uid in holders & heard):
            # The first of those that were cut off is back; others that can be reached are waited for.
            heard |= {pod.uid for pod in self.world.pods.values() if pod.is_agent_up and pod.is_reachable} & living
        lost = holders - heard
        if len(lost) > job.settings.copies or key in given_up or job.checkpoints.is_void(key):
            return
        for rank, uids in places.items():
            if not uids - lost:
                raise Violation(f"{key} was called protected, and rank {rank}'s shard went with {sorted(lost)}")
            slots = [self.keepers[uid].find(key, rank) for uid in uids - lost if uid in self.keepers]
            if any(slot is not None and slot.is_spoiled for slot in slots):
                return
            if not any(slots):
                raise Violation(f"{key} was called protected, and {sorted(uids - lost)} have overwritten rank {rank}'s")
        self.num_kept_promises += bool(lost)
        if not keys or keys[0] < key:
            raise Violation(
                f"iteration {iteration}: {key} was protected and {sorted(lost)} lost, the plan names {keys}"
            )

    def _arena(self, uid: str) -> str:
        return "aa" if self.kind == "host" else uid.removeprefix("uid-")

    # ---------------------------------------------------------------------------------------------------- the training

    def entered(self, iteration: int, term: int) -> None:
        """All ranks have entered an iteration: they load together."""
        if self.is_on:
            self.states.pop(iteration, None)
            self.world.after(self.random.uniform(0.01, 0.5), partial(self._load, iteration, term), "")

    def _load(self, iteration: int, term: int) -> None:
        """The collective of all ranks: one candidate after the other, until all say yes."""
        seats = self._seats(iteration, term)
        if seats is None:
            return
        refused: list[tuple[int, str]] = []
        told = self._told(iteration, term, seats)
        whole = self._whole(seats)
        found = whole if told is None else [StepKey(*key) for key in told.later(whole)] + list(_keys(told))
        self.num_later += told is not None and len(found) > len(_keys(told))
        for key in found:
            slots = {rank: self._read(key, rank, pod, len(seats)) for rank, (pod, _worker) in seats.items()}
            if all(slot is not None for slot in slots.values()):
                self._restore(iteration, term, seats, key, tuple(refused))
                return
            refused.append((key.step, "cannot be read"))
        self._check_nothing_better(seats, None, found)
        self.num_lost += bool(refused)
        self.states[iteration] = (None, ())
        self._begin(iteration, term, seats, Load(term, iteration, LoadSource.NOTHING, refused=tuple(refused[:4])))

    def _told(self, iteration: int, term: int, seats: dict[int, tuple[Pod, Worker]]) -> Restore | None:
        """Return what the plan says, which must be one thing on all ranks."""
        restores = {pod.uid: None if pod.plan is None else pod.plan.restore for pod, _worker in seats.values()}
        if None in restores.values():
            if (
                set(restores.values()) != {None}
                and len({pod.plan and pod.plan.term for pod, _w in seats.values()}) == 1
            ):
                raise Violation(f"iteration {iteration}: some pods are told what to restore, others are not")
            return None
        orders = {(_keys(r), r.floors, r.given_up): r for r in restores.values() if r is not None}
        if len(orders) != 1:
            raise Violation(f"iteration {iteration}: pods are told to restore {list(orders)}")
        return orders.popitem()[1]

    def _whole(self, seats: dict[int, tuple[Pod, Worker]]) -> list[StepKey]:
        """Return what ranks find out among themselves."""
        uids = self._readable(seats)
        found: dict[StepKey, set[int]] = {}
        for uid in uids:
            for slot in self.keepers[uid].all() if uid in self.keepers else ():
                if slot.is_sealed:
                    found.setdefault(slot.key, set()).add(slot.rank)
        return sorted((key for key, ranks in found.items() if len(ranks) == key.world_size), reverse=True)

    def _readable(self, seats: dict[int, tuple[Pod, Worker]]) -> set[str]:
        return set(self.keepers) if self.kind == "host" else {pod.uid for pod, _worker in seats.values()}

    def _read(self, key: StepKey, rank: int, pod: Pod, world_size: int) -> list[Slot] | None:
        """Return what a rank reads of a checkpoint; None when it cannot."""
        wanted = [rank] if key.world_size == world_size else range(key.world_size)
        slots = [self._slot(key, one, pod.uid) or self._fetched(key, one, pod) for one in wanted]
        return None if any(slot is None for slot in slots) else [slot for slot in slots if slot is not None]

    def _near(self, key: StepKey, rank: int, pod: Pod, world_size: int) -> list[Slot] | None:
        """Return what a rank reads without others' keepers; None when it cannot."""
        wanted = [rank] if key.world_size == world_size else range(key.world_size)
        slots = [self._slot(key, one, pod.uid) if self._is_told_of(key, one, pod.uid) else None for one in wanted]
        return None if any(slot is None for slot in slots) else [slot for slot in slots if slot is not None]

    def _is_told_of(self, key: StepKey, rank: int, uid: str) -> bool:
        own = self.keepers[uid].slots.values() if uid in self.keepers else ()
        is_own = any((slot.key, slot.rank) == (key, rank) for slot in own)
        return self.kind != "copies" or is_own or (key, rank) in self.told.get(uid, ())

    def _is_over(self, key: StepKey) -> bool:
        """Return whether a later iteration has begun without this step, and has saved since."""
        loads = {load for keeper in self.keepers.values() for load in keeper.loads}
        return any(load.voids(*key[:3]) and (load.iteration, load.term) in self.committed for load in loads)

    def _slot(self, key: StepKey, rank: int, uid: str) -> Slot | None:
        keepers = self.keepers.values() if self.kind == "host" else [self.keepers[uid]] if uid in self.keepers else []
        slots = (keeper.find(key, rank) for keeper in keepers)
        return next((slot for slot in slots if slot is not None and not slot.is_spoiled), None)

    def _fetched(self, key: StepKey, rank: int, pod: Pod) -> Slot | None:
        """Return a shard that others hand out, as the plan says."""
        restore = None if pod.plan is None else pod.plan.restore
        living = {one.uid for one in self.world.pods.values() if one.is_alive}
        for candidate in () if restore is None else restore.candidates:
            if (candidate.iteration, candidate.term, candidate.step, candidate.world_size) != key:
                continue
            for first, number, kept, uid in candidate.fetches:
                keeper = self.keepers.get(uid) if uid in living else None
                if first <= rank < first + number and keeper is not None:
                    slot = keeper.find(key, kept + rank - first)
                    if slot is not None and not slot.is_spoiled:
                        self.num_fetched += 1
                        return slot
        return None

    def _restore(
        self,
        iteration: int,
        term: int,
        seats: dict[int, tuple[Pod, Worker]],
        key: StepKey,
        refused: tuple[tuple[int, str], ...],
    ) -> None:
        read = [self._read(key, rank, pod, len(seats)) or [] for rank, (pod, _worker) in seats.items()]
        states = {slot.state for slots in read for slot in slots}
        if len(states) != 1:
            raise Violation(f"iteration {iteration} restores a mixed state: {states}")
        state = states.pop()
        if state[-1] != key[:3]:
            raise Violation(f"iteration {iteration} restores {state[-1]}, and was told {key}")
        self._check_timeline(iteration, seats, key)
        self.num_restored += 1
        self.num_chosen_again += bool(refused)
        self.states[iteration] = (key, state)
        load = Load(term, iteration, LoadSource.MEMORY, key.term, key.iteration, key.step, refused[:4])
        self._begin(iteration, term, seats, load)

    def _begin(self, iteration: int, term: int, seats: dict[int, tuple[Pod, Worker]], load: Load) -> None:
        """Each rank tells its keeper what it loaded, and begins to train when all have."""
        for rank, (pod, worker) in seats.items():
            self.world.after(self.random.uniform(0.0, 0.2), partial(self._note, pod, worker, rank, load), "")
        self._save_later(iteration, term, 0.3)

    def _note(self, pod: Pod, worker: Worker, rank: int, load: Load) -> None:
        """A keeper hears what was loaded: what is newer in earlier iterations is void, and freed."""
        if not self._is_in(pod, worker, load.iteration):
            return
        keeper = self.keeper(pod)
        if not any((one.iteration, one.term) == (load.iteration, load.term) for one in keeper.loads):
            keeper.loads = (*keeper.loads, load)[-MAX_LOADS:]
        if load.source is LoadSource.MEMORY:
            for place, slot in list(keeper.slots.items()):
                if load.voids(*slot.key[:3]):
                    del keeper.slots[place]
            own = [
                index
                for (local_rank, index), slot in keeper.slots.items()
                if local_rank == worker.local_rank and slot.is_sealed and slot.key[:3] == load.of_order
            ]
            if own:
                keeper.kept[worker.local_rank] = own[0]
            else:
                keeper.kept.pop(worker.local_rank, None)
        self.world.after(self.random.uniform(0.0, 0.05), pod.report, "")

    def _save_later(self, iteration: int, term: int, least_s: float) -> None:
        delay_s = least_s + self.random.choice([0.2, 1.0, 4.0, 15.0])
        if self.world.is_calm:
            # Nothing breaks any more: what one save after the other shows has been seen by then.
            delay_s += CALM_SAVE_S
        self.world.after(delay_s, partial(self._save, iteration, term), "")

    def _save(self, iteration: int, term: int) -> None:
        """All ranks save after the same step, each in its time; the next save comes after the last of them."""
        seats = self._seats(iteration, term)
        if seats is None or iteration not in self.states:
            return
        start, before = self.states[iteration]
        last = self.committed.get((iteration, term)) or start
        step = max(-1 if last is None else last.step, self.tried.get((iteration, term), -1)) + self.random.randint(1, 3)
        self.tried[iteration, term] = step
        key = StepKey(iteration, term, step, len(seats))
        state = (*before, key[:3])
        pending = set(seats)
        for rank, (pod, worker) in seats.items():
            slot = Slot(key, rank, state)
            delay_s = self.random.uniform(0.0, 0.1)
            self.world.after(delay_s, partial(self._write, pod, worker, slot, pending), "")

    def _write(self, pod: Pod, worker: Worker, slot: Slot, pending: set[int]) -> None:
        if not self._is_in(pod, worker, slot.key.iteration):
            return
        keeper = self.keeper(pod)
        index = keeper.target(worker.local_rank, slot.key)
        if index is None:
            self.num_skipped += 1
            self._end_save(slot, pending, is_sealed=False)
            return
        keeper.slots[worker.local_rank, index] = slot

        def seal() -> None:
            if self._is_in(pod, worker, slot.key.iteration) and keeper.slots.get((worker.local_rank, index)) is slot:
                self._seal(pod, worker, index, slot, pending)

        self.world.after(self.random.uniform(0.001, 0.3), seal, "")

    def _seal(self, pod: Pod, worker: Worker, index: int, slot: Slot, pending: set[int]) -> None:
        keeper = self.keeper(pod)
        sealed = Slot(slot.key, slot.rank, slot.state, is_sealed=True)
        keeper.slots[worker.local_rank, index] = sealed
        keeper.kept[worker.local_rank] = index
        self.sealed.add((pod.uid, slot.key, slot.rank))
        self._end_save(slot, pending, is_sealed=True)

        def verify() -> None:
            if pod.is_alive and keeper.slots.get((worker.local_rank, index)) is sealed:
                verified = Slot(slot.key, slot.rank, slot.state, is_sealed=True, is_verified=True)
                keeper.slots[worker.local_rank, index] = verified
                self.verified.add((slot.key, slot.rank))
                self._send_copies(pod, verified)
                pod.report()

        self.world.after(self.random.uniform(0.001, 2.0), verify, "")

    def _end_save(self, slot: Slot, pending: set[int], is_sealed: bool) -> None:
        """A rank goes on; the last one says whether all have sealed it."""
        pending.discard(slot.rank)
        if not is_sealed:
            pending.add(_SKIPPED)
        if not pending - {_SKIPPED}:
            if not pending:
                self.committed[slot.key.iteration, slot.key.term] = slot.key
            self._save_later(slot.key.iteration, slot.key.term, 0.0)

    def spoil(self, pick: float) -> None:
        """Flip a bit of the newest sealed slot of some pod."""
        keepers = [keeper for keeper in self.keepers.values() if any(s.is_sealed for s in keeper.slots.values())]
        if keepers:
            keeper = keepers[int(pick * len(keepers))]
            place = max((p for p, s in keeper.slots.items() if s.is_sealed), key=lambda p: keeper.slots[p].key)
            slot = keeper.slots[place]
            keeper.slots[place] = Slot(slot.key, slot.rank, slot.state, True, slot.is_verified, is_spoiled=True)
            self.world.tell(f"a bit of {keeper.uid}'s step {slot.key.step} flips")

    def pod_died(self, pod: Pod) -> None:
        """Its memory goes with it, unless it is the host's."""
        if self.kind != "host":
            self.keepers.pop(pod.uid, None)

    def _is_in(self, pod: Pod, worker: Worker, iteration: int) -> bool:
        is_running = worker.phase is WorkerPhase.RUNNING and worker.iteration == iteration
        return pod.is_alive and is_running and not worker.is_hung

    def _seats(self, iteration: int, term: int) -> dict[int, tuple[Pod, Worker]] | None:
        """Return who trains in an iteration, if a collective of all of them would end."""
        if not self.world.is_intact(iteration):
            return None
        seats = self.world.entries[iteration]
        is_same = all(self._is_in(pod, worker, iteration) for pod, worker in seats.values())
        return dict(seats) if is_same and self.world.terms.get(iteration) == term else None

    # ------------------------------------------------------------------------------------------------------ what holds

    def check_cut(self, plans: list[tuple[Pod, Plan]], complete: StepKey | None) -> None:
        """Check a plan as it is cut. `complete`: the newest step that was called so before."""
        # A coordinator that takes a job over may send the plan that it found, and the next one, in one step.
        newest = max((plan.iteration for _pod, plan in plans), default=-1)
        plans = [(pod, plan) for pod, plan in plans if plan.iteration == newest]
        if not self.is_on or not plans:
            return
        iteration, term = newest, plans[0][1].term
        seats = {part.rank: pod for pod, plan in plans for part in plan.ranks if part.rank is not None}
        if {plan.restore is None for _pod, plan in plans} != {plans[0][1].restore is None}:
            raise Violation(f"iteration {iteration}: some pods are told what to restore, others are not")
        if plans[0][1].restore is None or len(seats) != plans[0][1].world_size:
            return
        keys = _keys(plans[0][1].restore)
        self.restores[iteration, term] = plans[0][1].restore.candidates
        if any(_keys(plan.restore) != keys for _pod, plan in plans if plan.restore is not None):
            raise Violation(f"iteration {iteration}: pods are told to restore different steps")
        for key in keys:
            ranks = seats if key.world_size == len(seats) else range(key.world_size)
            self._check_named(key, {rank: seats[rank].uid if rank in seats else "" for rank in ranks})
        if complete is not None and any((complete, rank) not in self.verified for rank in range(complete.world_size)):
            raise Violation(f"{complete} is called complete, and not all ranks have verified it")
        coordinator = self.world.coordinator
        if coordinator is not None:
            self._check_best(iteration, seats, keys, complete, coordinator)

    def _check_best(
        self,
        iteration: int,
        seats: dict[int, Pod],
        keys: tuple[StepKey, ...],
        complete: StepKey | None,
        coordinator: Coordinator,
    ) -> None:
        """Check that a plan names nothing older than what was complete, and can be read by all as far as is known."""
        given_up = [known for known, _why in coordinator._job.recall.attempts.given_up]
        if self.kind == "copies":
            self._check_promise(iteration, keys, given_up)
        if complete is None or any(self._near(complete, rank, pod, len(seats)) is None for rank, pod in seats.items()):
            return
        if self._is_over(complete):
            return
        self.num_checked += 1
        if complete not in given_up and (not keys or keys[0] < complete):
            raise Violation(f"iteration {iteration}: {complete} is complete and can be read, the plan names {keys}")

    def _check_named(self, key: StepKey, readers: dict[int, str]) -> None:
        """Check that a plan names only what was once there for who shall read it."""
        for rank, reader in readers.items():
            holders = {uid for uid, sealed, held in self.sealed if (sealed, held) == (key, rank)}
            if not holders or (self.kind == "pod" and reader and reader not in holders):
                raise Violation(f"the plan names {key}, and {reader} never had the shard of rank {rank}")

    def _check_timeline(self, iteration: int, seats: dict[int, tuple[Pod, Worker]], key: StepKey) -> None:
        """Nothing is restored that was given up for a timeline which has committed since, as all of its pods know."""
        for pod, _worker in seats.values():
            for load in self.keeper(pod).loads:
                epoch = (load.iteration, load.term)
                is_known = epoch in self.committed and epoch[0] < iteration and load.source is LoadSource.MEMORY
                if is_known and load.voids(*key[:3]):
                    raise Violation(f"iteration {iteration} restores {key}, which is void after {load}")

    def _check_nothing_better(
        self, seats: dict[int, tuple[Pod, Worker]], key: StepKey | None, found: list[StepKey]
    ) -> None:
        """What the plan named is not passed over while all can read it."""
        for one in found:
            if all(self._read(one, rank, pod, len(seats)) is not None for rank, (pod, _w) in seats.items()):
                raise Violation(f"{one} could be read by all ranks, and {key} was taken")

    def check_table(self) -> None:
        """Count what the coordinator knows anew."""
        coordinator = self.world.coordinator
        if coordinator is None or not self.is_on:
            return
        table = coordinator._job.checkpoints
        found: dict[StepKey, set[tuple[int, str]]] = {}
        for uid, place in table._places.items():
            for key, shards in place.shards.items():
                found.setdefault(key, set()).update([(rank, uid) for rank in shards])
        for key, step in table.steps.items():
            if found.get(key, set()) != {(rank, uid) for rank, places in step.holders.items() for uid in places}:
                raise Violation(f"the table of checkpoints contradicts itself at {key}")
            if step.num_verified != sum(any(d.data for d in places.values()) for places in step.holders.values()):
                raise Violation(f"verified shards of {key} are miscounted")


def _keys(restore: Restore | None) -> tuple[StepKey, ...]:
    candidates = () if restore is None else restore.candidates
    return tuple(StepKey(one.iteration, one.term, one.step, one.world_size) for one in candidates)


def _copies(keeper: Keeper) -> tuple[Copy, ...]:
    return tuple(
        Copy(owner, slot.key.term, slot.key.iteration, slot.key.step, slot.key.world_size, ((rank, "aa", _data(slot)),))
        for (owner, rank), slots in keeper.copies.items()
        for slot in slots
    )


def _data(slot: Slot) -> str:
    return f"{hash((slot.state, slot.rank)) & 0xFFFFFFFF:x}"


def _holdings(keeper: Keeper) -> list[Holding]:
    by_key: dict[StepKey, list[tuple[int, str, str]]] = {}
    for slot in keeper.slots.values():
        if slot.is_sealed:
            data = _data(slot) if slot.is_verified else ""
            by_key.setdefault(slot.key, []).append((slot.rank, "aa", data))
    return [
        Holding(keeper.uid, key.term, key.iteration, key.step, key.world_size, tuple(shards))
        for key, shards in by_key.items()
    ]
