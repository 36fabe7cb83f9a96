"""How all ranks find and read the same checkpoint.

ask the keeper -> gather what each host has -> which can I read? -> newest that all can -> verify -> all right? -> copy
                                                    ^                                        │
                                                    └────────── no: the next older ──────────┘
"""

import logging
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.checkpoint.planner import LoadPlan

from unbroken.memory.agreement import all_true, gather
from unbroken.memory.arena import WorkerSlots
from unbroken.memory.choosing import ReadableCheckpoint, ReadableShard, candidates, why_void, with_later
from unbroken.memory.client import shortened
from unbroken.memory.new_state.lazy_state import LazyState, is_optimizer, no_place, refuse_lost
from unbroken.memory.new_state.nested import OTHER_SIZE, LoadPlanner, real_path, with_places, without
from unbroken.memory.place import WorkerInfo
from unbroken.memory.reading import Contents, missing
from unbroken.memory.remote import Holders, Remote
from unbroken.memory.shard import is_stateful, state_dicts
from unbroken.memory.sources import DiffersError, Source, UnreadableError, open_source
from unbroken_core.pod.memory_messages import MAX_REQUEST_BYTES, Found, FoundSlot
from unbroken_core.pod.memory_slots import Moment
from unbroken_core.vocabulary.checkpoints import MAX_CANDIDATES, Load, LoadSource, Restore

logger = logging.getLogger(__name__)

_WHAT_GROWS = "; tensors are restored to the size that a new state gives them: keep what grows as a list of numbers"

_OFFER_NUMBERS = 5
_MAX_REASON_BYTES = (MAX_REQUEST_BYTES - 512) // MAX_CANDIDATES
"""Of why a step was refused, in the line that tells the keeper of a load; the rest is for the numbers beside it."""


class _PartialError(UnreadableError):
    """The new state has something that none of these shards has: it is gone, or another shard has it."""


class KeeperAwayError(RuntimeError):
    """What is there to be restored cannot be read now, from this pod."""


@dataclass(frozen=True)
class Chosen:
    """A checkpoint that every rank can read, and this rank's part in it."""

    moment: Moment
    contents: Contents
    plan: LoadPlan
    planner: LoadPlanner
    values: dict[str, Any]
    """Dictionaries of the state, which the plan fills."""
    unclaimed: list[str]
    """Names in the checkpoint that the state has no place for."""


class Restoration:
    """One `load`. Every rank of the default group makes the same calls in the same order."""

    def __init__(self, arena: WorkerSlots | None, place: WorkerInfo) -> None:
        """Raises KeeperAwayError where the plan names checkpoints and this pod's keeper does not answer."""
        self._place = place
        self._arena = arena
        if arena is not None:
            arena.looks_for(place)
        found = None if arena is None else arena.find()
        if arena is not None and found is None:
            _refuse_to_begin_anew(place.restore)
        self._slots: tuple[FoundSlot, ...] = () if found is None else _newest_of_each(found)
        if found is not None and found.bad:
            logger.warning("checkpoints in memory that must not be read: %s", "; ".join(found.bad)[:2000])
        self._sources: dict[FoundSlot, Source] = {}
        self._remote = Remote(arena, Holders(place.restore), place.iteration)
        self._refused: dict[ReadableCheckpoint, str] = {}
        self._own: dict[ReadableCheckpoint, str] = {}
        """What this rank itself could not read, and why."""
        self._differing: set[ReadableCheckpoint] = set()
        """Those that were counted: a slot may be tried more than once."""
        rows = [(one.term, one.iteration, one.step, one.rank, one.world_size) for one in self._slots]
        offers = [
            ReadableShard(Moment(term, iteration, step), rank, world_size)
            for of_rank in gather(rows, _OFFER_NUMBERS)
            for term, iteration, step, rank, world_size in of_rank
        ]
        self._is_any = bool(offers)
        self.candidates = candidates(offers)
        self._why_none = ""
        self._void = ""
        if _is_told(place.restore) and place.restore is not None:
            self._why_none = place.restore.reason
            self._void = why_void(place.restore, self.candidates)
            self.candidates = with_later(place.restore, self.candidates)
        # Else an agent does not know of plans for it.

    def choose(self, state: Mapping[str, Any], oldest: int | None) -> Chosen | None:
        """Return the newest checkpoint that all ranks can read whole; None when there is none.

        `oldest`: checkpoints of steps before this one are no use, since the disk has a newer one.
        """
        # One after which the training failed again and again comes behind the disk.
        whole = [
            one for one in self.candidates if oldest is None or (one.moment.step >= oldest and not one.is_given_up)
        ]
        lazy = LazyState(state)
        # Once, on all ranks: dictionaries may wait for other ranks, which may need another number of attempts.
        others = {name: one for name, one in state.items() if not is_optimizer(one)}
        asked = state_dicts(others) if whole else {}
        for candidate in whole:
            chosen = self._try(candidate, {**state, **asked}, lazy)
            if all_true(chosen is not None):
                if self._remote.num_bytes:
                    text = "step %d is restored with %d bytes from other pods"
                    logger.info(text, candidate.moment.step, self._remote.num_bytes)
                self._explain(whole, candidate)
                if chosen is not None:
                    if chosen.unclaimed:
                        _tell_unclaimed(chosen)
                    tell_of_loaders(state, candidate.moment.step, candidate.world_size, self._place)
                    _refuse_lost(state, chosen)
                return chosen
            self._refused.setdefault(candidate, "another rank cannot read it")
        lazy.drop()
        self._explain(whole, None)
        return None

    def load(
        self,
        source: LoadSource,
        moment: Moment | None = None,
        refused_on_disk: Sequence[tuple[int, str]] = (),
    ) -> Load:
        """Return what the keeper, and through it the coordinator, is told of this load."""
        own = ((one.moment.step, why) for one, why in self._own.items())
        all_refused = (*refused_on_disk, *own)[:MAX_CANDIDATES]
        refused = tuple((step, shortened(why[:500], _MAX_REASON_BYTES)) for step, why in all_refused)
        term, iteration = self._place.term, self._place.iteration
        if moment is None:
            return Load(term, iteration, source, refused=refused)
        return Load(term, iteration, source, moment.term, moment.iteration, moment.step, refused)

    def tell_anew(self, newest_step: int, *, is_disk: bool) -> None:
        """Log on one rank that the training begins anew, unless there was none before. A collective of all ranks.

        `newest_step`: the last that this process has made, as far as it knows; -1: none.
        """
        newest = max(step for ((step,),) in gather([[newest_step]], 1))
        why = self._why_none or self._void or next(iter(self._refused.values()), "")
        if self._place.rank or (newest < 0 and not why and not self._is_any):
            return
        if not why and self._arena is None:
            why = "the job has none"
        elif not why:
            why = "not all shards of one are left" if self._is_any else "none was on all ranks, or all are lost"
        logger.error(
            "no checkpoint is restored, and the training begins anew at its beginning: all of its steps%s are lost; "
            "in memory: %s; on the disk: %s",
            *(f" up to {newest}" if newest >= 0 else "", why, "none" if is_disk else "the job names none, with disk="),
        )

    def close(self) -> None:
        """Unmap all that was opened."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._remote.close()

    def _try(self, candidate: ReadableCheckpoint, state: Mapping[str, Any], lazy: LazyState) -> Chosen | None:
        """Plan how this rank would read a candidate; None when it cannot."""
        widest: list[Callable[[], Source]] | None = None
        for choice, is_all in self._choices(candidate):
            try:
                chosen = self._try_choice(candidate, choice, state, lazy, is_all=is_all)
            except _PartialError:
                widest = choice
                continue
            if chosen is not None:
                return chosen
        # No shard that can be read has it.
        return None if widest is None else self._try_choice(candidate, widest, state, lazy, is_all=True)

    def _try_choice(
        self,
        candidate: ReadableCheckpoint,
        choice: Sequence[Callable[[], Source]],
        state: Mapping[str, Any],
        lazy: LazyState,
        *,
        is_all: bool,
    ) -> Chosen | None:
        """Plan how this rank would read these shards; None when it cannot. Raises _PartialError."""
        try:
            if not choice:
                raise UnreadableError("the shards that this rank needs are on no host that it knows of")
            # One after the other: what was opened is known, should the next one fail.
            chosen = self._plan(candidate.moment, [one() for one in choice], state, lazy, is_all=is_all)
        except _PartialError:
            raise
        except UnreadableError as error:
            self._refused[candidate] = self._own[candidate] = str(error)
            if isinstance(error, DiffersError) and candidate not in self._differing:
                self._differing.add(candidate)
                if self._arena is not None:
                    self._arena.differs()
            return None
        self._own.pop(candidate, None)
        return chosen

    def _choices(self, candidate: ReadableCheckpoint) -> Iterator[tuple[list[Callable[[], Source]], bool]]:
        """Yield which shards to read, the cheapest choice first, and whether they are all that this rank had.

        The own shard alone is one layout to read, on this host or from another pod; the others have to be read when the
        world has changed. Those of other pods come a few at a time, since each costs its layout.

        In a world of the same size the own shard comes first in each: what each rank has for itself, as the state of
        its random numbers, has the same name on all of them. Who has not that shard has no part in this checkpoint.
        """
        slots = {
            one.rank: one
            for one in self._slots
            if Moment(one.term, one.iteration, one.step) == candidate.moment and one.world_size == candidate.world_size
        }
        rank, remote = self._place.rank, self._remote
        if candidate.world_size != self._place.world_size:
            yield from self._choices_of_all(candidate, slots, [])
            return
        own: list[Callable[[], Source]] = []
        if rank in slots:
            own.append(partial(self._open, slots[rank]))
        for _ in range(remote.num_holders(candidate, rank)):
            # Another holder is asked if one fails in the middle.
            own.append(partial(remote.open, candidate, rank))
        if not own:
            yield [], True
        for one in own:
            yield [one], True
        # The same number of ranks may have divided the tensors in another way.
        others = {other: slot for other, slot in slots.items() if other != rank}
        for first in own[:1] + own[1:][-1:]:
            yield from self._choices_of_all(candidate, others, [first])

    def _choices_of_all(
        self, candidate: ReadableCheckpoint, slots: Mapping[int, FoundSlot], first: list[Callable[[], Source]]
    ) -> Iterator[tuple[list[Callable[[], Source]], bool]]:
        """Yield more and more shards, those on this host first, behind what each choice begins with."""
        remote = self._remote
        local = first.copy()
        local.extend(partial(self._open, slots[other]) for other in sorted(slots))
        if local or not remote.has_any(candidate):
            yield [*local], False
        near = (self._place.rank + 0.5) / self._place.world_size
        skipped = {*slots, self._place.rank} if first else {*slots}
        others = [other for other in remote.ranks(candidate, near) if other not in skipped]
        number = 1
        while number < 2 * len(others):
            yield [*local, *(partial(remote.open, candidate, other) for other in others[:number])], False
            number *= 2

    def _plan(
        self, moment: Moment, sources: Sequence[Source], state: Mapping[str, Any], lazy: LazyState, *, is_all: bool
    ) -> Chosen:
        """Return how to read these shards. Raises UnreadableError.

        `is_all`: what none of them has is gone, and is not another shard's.
        """
        contents = Contents(sources)
        metadata = contents.metadata
        lazy.fit(metadata.state_dict_metadata)
        planner, values = LoadPlanner(), state_dicts(state)
        places = contents.places
        lacking = places.lacking(values)
        if lacking.tensors:
            planner.set_up_planner(values, metadata)
        values = with_places(values, lacking.make(planner.state_dict if lacking.tensors else {}, metadata))
        planner.set_up_planner(values, metadata)
        if gone := places.gone(planner.mappings, metadata.state_dict_metadata):
            if not is_all:
                raise _PartialError(f"{'.'.join(map(str, gone[0]))}: another shard may have it"[:500])
            values = without(values, [tuple(real_path(values, path)) for path in gone], places.objects.values())
            planner.set_up_planner(values, metadata)
        try:
            plan = planner.create_local_plan()
        except (RuntimeError, ValueError) as error:
            # A name that was not saved, or another size.
            raise UnreadableError(str(error)[:500]) from error
        if incomplete := missing(plan, planner.state_dict, metadata):
            raise UnreadableError(incomplete)
        # All of it, before anything is overwritten: a state is never half restored.
        contents.verify(plan)
        return Chosen(moment, contents, plan, planner, values, contents.unclaimed(planner.state_dict))

    def _open(self, slot: FoundSlot) -> Source:
        if slot not in self._sources:
            self._sources[slot] = open_source(slot, None if self._arena is None else self._arena.mapped(slot.path))
        return self._sources[slot]

    def _is_later(self, chosen: ReadableCheckpoint | None) -> bool:
        """Return whether it is one that the plan did not name, since it was saved after all that it names."""
        told = () if self._place.restore is None else self._place.restore.candidates
        named = [(Moment(one.term, one.iteration, one.step), one.world_size) for one in told]
        return chosen is not None and (chosen.moment, chosen.world_size) not in named

    def _explain(self, whole: Sequence[ReadableCheckpoint], chosen: ReadableCheckpoint | None) -> None:
        """Log what is lost, if anything: nobody shall fall back in silence."""
        if self._why_none and not self._is_later(chosen):
            logger.warning("checkpoint in memory not used: %s", self._why_none)
        passed = [one for one in whole if one == chosen or one in self._refused]
        for one in passed:
            if one == chosen:
                return
            reason = self._refused[one]
            if reason.startswith(OTHER_SIZE):
                reason += _WHAT_GROWS
            logger.warning("checkpoint in memory not used: step=%d: %s", one.moment.step, reason)
        if self._is_any and not whole and self._void:
            logger.warning("checkpoint in memory not used: %s", self._void)
        elif self._is_any and not whole and not self._why_none:
            logger.warning(
                "no checkpoint in memory is whole: parts of other ranks were never saved, or went with their pods"
            )
        elif self._arena is not None and self._place.iteration and not (self._is_any or whole or self._why_none):
            # A rendezvous that was started again may not know what there was.
            logger.warning("no checkpoint in memory is left: no pod of this iteration has a part of one")


def _refuse_to_begin_anew(restore: Restore | None) -> None:
    """Raise KeeperAwayError where a plan names checkpoints: without this rank nobody could go back to them.

    All ranks would begin anew, and the checkpoints would be void. As a fault of this rank it is repaired: the keeper is
    started again, or the pod's ranks move to one that has a keeper.
    """
    named = [] if restore is None else [one.step for one in restore.candidates if not one.is_given_up]
    if named:
        raise KeeperAwayError(
            f"checkpoint of step {named[0]} in memory: want the answer of this pod's keeper, got none; the agent's log "
            "says more, which starts a keeper again that has ended"
        )


def tell_of_loaders(state: Mapping[str, Any], step: int, world_size: int, place: WorkerInfo) -> None:
    """Log on one rank which parts of a state know a place in the data of one rank, in a world that is another now."""
    if place.rank or world_size == place.world_size:
        return
    for name, one in state.items():
        if any(str(kind.__module__).split(".")[0] == "torchdata" for kind in type(one).__mro__):
            logger.warning(
                "%s: a %s knows where one rank was in its data, in a world of %d ranks; in one of %d, from step %d on, "
                "some samples come twice and others never: see `GlobalBatches` of unbroken.integrations",
                *(str(name)[:100], type(one).__name__, world_size, place.world_size, step),
            )


def _tell_unclaimed(chosen: Chosen) -> None:
    names = ", ".join(chosen.unclaimed[:10])[:1000]
    logger.warning(
        "not restored, since the state has no place for it: step=%d names=%d: %s; let a new state have the keys that "
        "it has when it is saved",
        chosen.moment.step,
        len(chosen.unclaimed),
        names,
    )


def _refuse_lost(state: Mapping[str, Any], chosen: Chosen) -> None:
    """Raise ValueError where no rank has a place for something that the checkpoint has. A collective of all ranks.

    It would go on as if it began, and nobody would see more than another loss. A rank that has only a part of the
    state, as in a pipeline, lacks what others have.
    """
    # Of optimizers `refuse_lost` says it.
    parts = tuple(f"{name}." for name, one in state.items() if not is_optimizer(one))
    lost = {zlib.crc32(name.encode()): name for name in chosen.unclaimed if name.startswith(parts)}
    everywhere = set.intersection(*({number for (number,) in rows} for rows in gather([[one] for one in lost], 1)))
    found = sorted(name for number, name in lost.items() if number in everywhere)
    if not found:
        return
    owner = max((name for name in state if found[0].startswith(f"{name}.")), key=len)
    raise no_place(found, chosen.moment.step, is_model=isinstance(state[owner], nn.Module))


def _is_told(restore: Restore | None) -> bool:
    """Return whether all ranks were told the same. A collective of all ranks."""
    told = ""
    if restore is not None:
        keys = [(c.term, c.iteration, c.step, c.world_size, c.is_given_up) for c in restore.candidates]
        told = repr((keys, restore.floors, restore.given_up))
    rows = gather([[int(restore is not None), zlib.crc32(told.encode())]], 2)
    if all(row == [[0, 0]] for row in rows):
        return False
    if any(row != rows[0] for row in rows):
        logger.warning("restore: ranks were not told the same, and agree among themselves")
        return False
    return True


def apply(chosen: Chosen, state: Mapping[str, Any]) -> None:
    """Copy a checkpoint into the state. Raises ValueError for an optimizer that is another one."""
    refuse_lost(state, chosen.unclaimed)
    chosen.contents.read(chosen.plan, chosen.planner)
    for name, one in state.items():
        if is_stateful(one):
            _refuse_other_groups(name, one, chosen)
            one.load_state_dict(chosen.values[name])


def _refuse_other_groups(name: str, one: object, chosen: Chosen) -> None:
    """torch refuses it as well, and does not say what to change."""
    kept = chosen.values[name]
    groups, saved = getattr(one, "param_groups", None), kept.get("param_groups") if isinstance(kept, dict) else None
    if isinstance(groups, list) and isinstance(saved, list) and len(groups) != len(saved):
        raise ValueError(
            f"{name}: want {len(saved)} parameter groups, as in the checkpoint of step {chosen.moment.step}, got "
            f"{len(groups)}; give it all its groups before load, also those that add_param_group adds later in training"
        )


def _newest_of_each(found: Found) -> tuple[FoundSlot, ...]:
    """Return one slot for each shard: one may lie in two places, after a pod was replaced."""
    shards: dict[tuple[int, int, int, int, int], FoundSlot] = {}
    for one in found.slots:
        shards.setdefault((one.term, one.iteration, one.step, one.rank, one.world_size), one)
    by_moment: defaultdict[tuple[int, int, int], list[FoundSlot]] = defaultdict(list)
    for one in shards.values():
        by_moment[one.iteration, one.term, one.step].append(one)
    newest = sorted(by_moment, reverse=True)
    return tuple(one for moment in newest for one in by_moment[moment])
