"""How often a hang is told right: random layouts and faults, by seed; some ranks do not answer, or record nothing."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.unit.unbroken_core.recovery.ranks_in_groups import SOFT_S, STOP, Ranks, grid, steps

from unbroken_core.recovery.hangs import HangVerdict, Witness, judge
from unbroken_core.vocabulary.reasons import Doing

NUM_SEEDS = 400
STEPS = 4
KINDS = ("stands", "frozen", "operation", "left out", "order", "link", "left behind")
SCRIPT = ("operation", "left out", "order")


def hang(rng: random.Random, kind: str) -> tuple[Ranks, int, int]:
    """Return ranks that stand still because of one of them, that one, and how many ranks a pod has."""
    num_tp, num_dp = rng.choice([(2, 8), (4, 4), (4, 16), (8, 8), (1, 32), (8, 3)])
    groups, programs = grid(num_tp, num_dp), steps(num_tp, num_dp, STEPS)
    if num_tp == 1:
        programs = {
            rank: [call for call in program if not call[0].startswith("tp")] for rank, program in programs.items()
        }
    culprit = rng.randrange(num_tp * num_dp)
    program = programs[culprit]
    at = rng.randrange(len(program) * (STEPS - 1) // STEPS)
    call = program[at]
    ranks = Ranks(groups, programs)
    match kind:
        case "stands" | "frozen":
            program.insert(at, STOP)
        case "operation":
            program[at] = (call[0], "broadcast")
        case "left out":
            del program[at]
        case "order":
            other = next(i for i in range(at + 1, len(program)) if program[i] != call)
            program[at], program[other] = program[other], call
        case _:
            number = sum(each[0] == call[0] for each in program[: at + 1])
            never = frozenset(groups[call[0]] if kind == "link" else [culprit])
            ranks.broken = lambda group, which: never if (group, which) == (call[0], number) else frozenset()
    ranks.run()
    return ranks, culprit, num_tp


def answers(
    rng: random.Random, ranks: Ranks, culprit: int, ranks_per_pod: int, kind: str, share: float
) -> Iterator[Witness]:
    """Yield what the ranks say; of the others than the culprit some say nothing, or nothing of their groups."""
    has_pings = rng.random() < 0.7
    for witness in ranks.witnesses(ranks_per_pod):
        activity = witness.activity
        assert activity is not None
        if not has_pings:
            activity = replace(activity, ping_s=-1.0)
        if witness.rank == culprit and kind == "frozen":
            activity = replace(activity, doing=Doing.FROZEN, what="", groups=(), num_groups=0)
        elif witness.rank != culprit and rng.random() < share:
            yield witness._replace(activity=rng.choice([None, replace(activity, groups=())]))
            continue
        yield witness._replace(activity=activity)


def is_right(kind: str, verdict: HangVerdict, culprit: int) -> bool:
    if kind in SCRIPT:
        return not verdict.ranks and verdict.text.startswith("the script's mistake")
    if kind == "link":
        return not verdict.ranks and verdict.text.startswith("no rank: ")
    return verdict.ranks == (culprit,)


def is_wrong(kind: str, verdict: HangVerdict, culprit: int) -> bool:
    """Return whether somebody is named who must not be."""
    return bool(verdict.ranks) if kind in (*SCRIPT, "link") else bool(set(verdict.ranks) - {culprit})


def told(share_silent: float) -> tuple[Counter[str], Counter[str], list[tuple[int, str, int, HangVerdict]]]:
    """Return of each kind how many hangs there were, how many were told right, and those that were told wrong."""
    num, right, wrong = Counter[str](), Counter[str](), []
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        ranks, culprit, ranks_per_pod = hang(rng, kind)
        if all(ranks.pending(rank) is None for rank in ranks.programs):
            continue  # Exchanged calls that nobody minds.
        verdict = judge(list(answers(rng, ranks, culprit, ranks_per_pod, kind, share_silent)), SOFT_S)
        num[kind] += 1
        right[kind] += is_right(kind, verdict, culprit)
        if is_wrong(kind, verdict, culprit):
            wrong.append((seed, kind, culprit, verdict))
    return num, right, wrong


@pytest.mark.parametrize("share_silent", [0.0, 0.02])
def test_hangs_are_told_right_and_no_machine_is_blamed_for_the_script_or_a_link(share_silent: float) -> None:
    num, right, wrong = told(share_silent)
    assert wrong == []
    assert right.total() >= 0.95 * num.total(), f"{right} of {num}"
