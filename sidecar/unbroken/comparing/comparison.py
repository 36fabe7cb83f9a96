"""Compares what two runs have saved. Pure.

A difference counts only where two calm runs agree: `noise` is what they differ in. Nothing to compare is never equal.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from unbroken.checkpoint_records import DIGEST_CHARACTERS, LoadedStep, SavedPart, Struck
from unbroken.comparing.records import Record
from unbroken_core.vocabulary.plurals import counted

MAX_NAMES_TOLD = 10
Place = tuple[int, int, int]
"""Step, rank, and the number of the save of both in its iteration, from 1."""
_LEFTOVERS = "it found what an earlier run had left; give each run a folder of its own, {run} in the script's arguments"
_STILL = (
    "no tensor of floating-point numbers changes from one checkpoint to the next: want what is trained in them, and "
    "not a copy that was made before"
)
_LONGER = "want a longer one, or an earlier --at-step"


class Sameness(Enum):
    """What a comparison says; the value is the command's exit code."""

    EQUAL = 0
    DIFFERENT = 1
    NOT_COMPARABLE = 2


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs differ first."""

    step: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    """Of this step, on any of these ranks, sorted."""
    num_tensors: int
    """So many of them are tensors."""
    num_steps: int
    """So many steps differ."""


@dataclass(frozen=True)
class Extent:
    """How much was compared: of each step a part for each rank, again where it was saved again."""

    num_steps: int = 0
    num_redone: int = 0
    """Steps that were saved before the fault, and again after it."""
    num_parts: int = 0
    num_tensors: int = 0
    """In all those parts, as are values."""
    num_values: int = 0


@dataclass(frozen=True)
class Compared:
    """One run beside the first calm one."""

    outcome: Sameness
    reason: str = ""
    """Why it is no more than that; "" where all is equal, or a difference says all."""
    difference: FirstDifference | None = None
    noise: tuple[str, ...] = ()
    """Values, none of them tensors of floating-point numbers, that calm runs differ in: left out."""
    struck: Struck | None = None
    restored: LoadedStep | None = None
    """With what the first iteration after the fault began."""
    extent: Extent = Extent()
    """After the fault, if there was one."""


def problem_of_calm(record: Record) -> str:
    """Return why this run cannot be what others are compared with; "" when it can."""
    if record.problem:
        return record.problem
    if not record.saves:
        return (
            "it saved no checkpoint in memory: want a script that calls unbroken.memory.Checkpointer.save, or an "
            "integration that does, more often than it did in this run"
        )
    iterations = _iterations(record)
    if len(iterations) > 1:
        return f"it was to be calm, but began {len(iterations)} times: want a script that does not fail by itself"
    skipped = next((one.skipped for one in record.saves if one.skipped), "")
    if all(one.skipped for one in record.saves):
        return f"the memory took none of its checkpoints: {skipped}"
    return _STILL if _is_still(record.saves) else ""


def step_to_strike(record: Record, rank: int) -> int | None:
    """Return from which step on a fault leads to steps that are made again, and saved after it; None: too few are.

    It comes after the middle one, and where more steps lie between two saves, half-way between them.
    """
    steps = sorted({one.step for one in record.saves if one.rank == rank and not one.skipped})
    if len(steps) < 3:
        return None
    middle = (len(steps) - 1) // 2
    return steps[middle] + max((steps[middle + 1] - steps[middle]) // 2, 1)


def compare_calm(first: Record, second: Record) -> Compared:
    """Return in what two calm runs differ: then the script is not deterministic by itself."""
    problem = second.problem or _other_begin(first, second) or (problem_of_calm(second) if second.saves else "")
    if problem:
        return Compared(Sameness.NOT_COMPARABLE, problem)
    left, right = _by_place(first.saves), _by_place(second.saves)
    if left.keys() != right.keys():
        return Compared(Sameness.NOT_COMPARABLE, f"two calm runs save other steps: {_other_steps(left, right)}")
    pairs = [(left[place], one) for place, one in right.items()]
    difference = _difference(pairs, frozenset())
    noise = frozenset(name for one, other in pairs for name in _differing(one, other))
    extent = _extent(pairs, noise)
    if difference is None:
        return Compared(Sameness.EQUAL, extent=extent)
    # Generators that nobody has seeded are tensors, too; what they draw is not, if nothing that is trained differs.
    is_usable = noise.isdisjoint(name for pair in pairs for one in pair for name in one.names[: one.num_floats])
    is_usable = is_usable and extent.num_tensors > 0
    return Compared(
        Sameness.EQUAL if is_usable else Sameness.NOT_COMPARABLE,
        f"{'but for what is left out' if is_usable else 'the script is not deterministic'}: two calm runs differ",
        difference,
        tuple(sorted(noise)),
        extent=extent,
    )


def compare_broken(calm: Record, broken: Record, noise: Iterable[str], exit_code: int) -> Compared:
    """Return whether a run with a fault has saved the same; steps that were saved twice are compared twice."""
    struck, ignored = broken.struck, frozenset(noise)
    after = () if struck is None else tuple(one for one in broken.saves if one.iteration > struck.iteration)
    loads = () if struck is None else tuple(one for one in broken.loads if one.iteration > struck.iteration)
    restored = min(loads, key=lambda one: (one.iteration, one.rank)) if loads else None
    if exit_code and not broken.problem:
        outcome = Sameness.DIFFERENT if struck is not None else Sameness.NOT_COMPARABLE
        when = "after the fault, and the calm runs with 0" if struck is not None else "before the fault"
        return Compared(outcome, f"it ended with exit code {exit_code} {when}", struck=struck, restored=restored)
    problem = _problem_of_broken(calm, broken, after, restored)
    if problem or struck is None or restored is None:
        return Compared(Sameness.NOT_COMPARABLE, problem, struck=struck, restored=restored)
    left, before = _by_place(calm.saves), [one for one in broken.saves if one.iteration <= struck.iteration]
    early = _difference([(left[place], one) for place, one in _placed(before) if place in left], ignored)
    if early is not None:
        text = "it differed before the fault already: the script is not deterministic by itself"
        return Compared(Sameness.NOT_COMPARABLE, text, early, struck=struck, restored=restored)
    # A script that saves before it trains a step saves the one that it went on from again: compared, but not wanted.
    pairs = [(left[place], one) for place, one in _placed(after) if place in left]
    wanted = {place for place in left if place[0] > restored.step}
    found = {place for place, _ in _placed(after) if place in wanted or place not in left}
    redone = {one.step for one in after} & {one.step for one in before}
    extent = replace(_extent(pairs, ignored), num_redone=len(redone))
    difference = _difference(pairs, ignored)
    reason = ""
    if wanted != found:
        reason = f"after the fault other steps were saved: {_other_steps(wanted, found)}"
    elif not extent.num_tensors:
        return Compared(
            Sameness.NOT_COMPARABLE,
            "no tensor was saved after the fault, beside what calm runs differ in",
            noise=tuple(sorted(ignored)),
            struck=struck,
            restored=restored,
        )
    is_equal = difference is None and not reason
    return Compared(
        Sameness.EQUAL if is_equal else Sameness.DIFFERENT,
        reason,
        difference,
        tuple(sorted(ignored)),
        struck,
        restored,
        extent,
    )


def _problem_of_broken(calm: Record, broken: Record, after: tuple[SavedPart, ...], restored: LoadedStep | None) -> str:
    """Return why this run says nothing of faults; "" when it does."""
    sizes, new = {one.world_size for one in calm.saves}, {one.world_size for one in after}
    step = None if restored is None else restored.step
    checks = (
        (bool(broken.problem), broken.problem),
        (bool(other := _other_begin(calm, broken)), other),
        (broken.struck is None, f"the training ended before the fault was due: {_LONGER}"),
        (not after and _has_gone_on(broken), "the script caught the fault itself: no new iteration began"),
        (step is None, "no rank called `load` after the fault: the training was not continued from memory"),
        (
            step == -1,
            "nothing was restored after the fault: the training began anew, which says nothing of checkpoints"
            f"{_lacking(broken)}",
        ),
        (step is not None and _newest(calm) <= step, f"no new step was saved after the fault: {_LONGER}"),
        (step is not None and _is_still(one for one in calm.saves if one.step >= step), _STILL),
        (
            bool(after) and sizes != new,
            f"the world has {_numbers(new)} ranks after the fault, and had {_numbers(sizes)}",
        ),
    )
    return next((text for is_so, text in checks if is_so), "")


def _lacking(record: Record) -> str:
    """Return which ranks had no checkpoint in memory while others had, and why; "" where there are none."""
    kept = {one.rank for one in record.saves if not one.skipped}
    lacking = set(range(max((one.world_size for one in record.saves), default=0))) - kept
    if not kept or not lacking:
        return ""
    skipped = next((f": {one.skipped}" for one in record.saves if one.rank in lacking and one.skipped), "")
    return f"; all ranks have to save, and rank {_numbers(lacking)} had no checkpoint in memory{skipped}"


def _is_still(saves: Iterable[SavedPart]) -> bool:
    """Whether several steps have the same tensors: then they are equal also where nothing goes on as it should."""
    steps, firsts = set[int](), dict[int, tuple[object, ...]]()
    for one in saves:
        num = one.num_floats or one.num_tensors
        found = (one.names[:num], one.digests[: num * DIGEST_CHARACTERS])
        if firsts.setdefault(one.rank, found) != found:
            return False
        steps.add(one.step)
    return len(steps) > 1


def _newest(record: Record) -> int:
    return max((one.step for one in record.saves), default=-1)


def _other_begin(first: Record, other: Record) -> str:
    """Return what is said of a run that began elsewhere than the first one."""
    begins, others = _begin(first), _begin(other)
    if not other.saves and not other.struck:
        return f"it trained no step that it saved, and the first run did: {_LEFTOVERS}"
    if other.struck and others[2] < 0:
        begins = (*begins[:2], -1)  # It was hit before its first save.
    if begins != others:
        return f"it began {_words(others)}, and the first run {_words(begins)}: {_LEFTOVERS}"
    return ""


def _has_gone_on(record: Record) -> bool:
    """Whether the rank that was hit made the save before which it was hit."""
    hit = record.struck
    return hit is not None and any(
        (one.iteration, one.rank) == (hit.iteration, hit.rank) and one.step >= hit.step for one in record.saves
    )


def _begin(record: Record) -> tuple[str, int, int]:
    """Return source and step of the first load, and the first step that was saved then."""
    first = min(_iterations(record), default=0)
    firsts: dict[int, LoadedStep] = {}
    for each in record.loads:
        if each.iteration == first:
            firsts.setdefault(each.rank, each)
    loads = [(one.source, one.step) for one in firsts.values()]
    saves = [one.step for one in record.saves if one.iteration == first]
    return (*(min(loads) if loads else ("nothing", -1)), min(saves, default=-1))


def _words(begin: tuple[str, int, int]) -> str:
    source, step, first = begin
    saved = f", with step {first} as the first that it saved" if first >= 0 else ""
    return (f"from step {step} ({source})" if step >= 0 else "anew") + saved


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _placed(saves: Iterable[SavedPart]) -> list[tuple[Place, SavedPart]]:
    """Return each save with its place: which step of which rank it is, and which time that is saved in its iteration.

    A script may save a step again, as the end of its training, with weights that it has averaged. The same values again
    are no other save: `flush` writes a step that the memory did not take before, and whether it did is chance.
    """
    last: dict[tuple[int, int, int], SavedPart] = {}
    times: Counter[tuple[int, int, int]] = Counter()
    found = []
    for one in saves:
        key = (one.iteration, one.step, one.rank)
        before, last[key] = last.get(key), one
        if before is None or (before.names, before.digests) != (one.names, one.digests):
            times[key] += 1
            found.append(((one.step, one.rank, times[key]), one))
    return found


def _by_place(saves: Iterable[SavedPart]) -> dict[Place, SavedPart]:
    return dict(_placed(saves))


def _other_steps(left: Collection[Place], right: Collection[Place]) -> str:
    texts = []
    for places, word in ((set(left) - set(right), "missing"), (set(right) - set(left), "more")):
        if places:
            step, rank, _ = min(places)
            texts.append(f"{counted(len(places), 'part')} {word}, first step {step} of rank {rank}")
    return "; ".join(texts)


def _differing(one: SavedPart, other: SavedPart) -> dict[str, bool]:
    """Return the names whose values differ, and whether one is a tensor in either."""
    if one.names == other.names and one.digests == other.digests:
        return {}
    left, right = _digests(one), _digests(other)
    tensors = {*one.names[: one.num_tensors], *other.names[: other.num_tensors]}
    return {name: name in tensors for name in left.keys() | right.keys() if left.get(name) != right.get(name)}


def _digests(one: SavedPart) -> dict[str, str]:
    found: dict[str, str] = {}
    for at, name in enumerate(one.names):
        # Two values may have one name: a key within a text, and one of the state.
        found[name] = found.get(name, "") + one.digests[at * DIGEST_CHARACTERS :][:DIGEST_CHARACTERS]
    return found


def _difference(pairs: Iterable[tuple[SavedPart, SavedPart]], ignored: frozenset[str]) -> FirstDifference | None:
    found: dict[int, dict[int, dict[str, bool]]] = {}
    for one, other in pairs:
        names = {name: kind for name, kind in _differing(one, other).items() if name not in ignored}
        if names:
            found.setdefault(one.step, {}).setdefault(one.rank, {}).update(names)
    if not found:
        return None
    step = min(found)
    names = {name: kind for each in found[step].values() for name, kind in each.items()}
    return FirstDifference(step, tuple(sorted(found[step])), tuple(sorted(names)), sum(names.values()), len(found))


def _extent(pairs: Sequence[tuple[SavedPart, SavedPart]], ignored: frozenset[str]) -> Extent:
    """Return how much there is to compare, without what is left out."""
    num_tensors = sum(name not in ignored for _, one in pairs for name in one.names[: one.num_tensors])
    num_values = sum(name not in ignored for _, one in pairs for name in one.names[one.num_tensors :])
    return Extent(len({one.step for _, one in pairs}), 0, len(pairs), num_tensors, num_values)


def _iterations(record: Record) -> set[int]:
    return {one.iteration for one in record.saves} | {one.iteration for one in record.loads}
