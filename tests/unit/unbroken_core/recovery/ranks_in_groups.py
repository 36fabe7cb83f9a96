"""Ranks that run lists of collectives in nested groups until all stand still, and what they say then."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unbroken_core.pod.group_ranks import rank_text
from unbroken_core.protocol.bounds import MAX_LAST
from unbroken_core.protocol.messages import Activity, GroupState
from unbroken_core.recovery.hangs import Witness
from unbroken_core.vocabulary.reasons import Doing

SOFT_S = 60.0
Call = tuple[str, str]
"""Group and operation."""
WAITS = Activity(0, Doing.COLLECTIVE, "all_reduce", 62.0, 62.0, -1, 0)
LOADS = Activity(0, Doing.OWN_CODE, "train.py:41 load_batch", 61.0, 61.0, -1, 0)
STOP = ("", "stop")
"""In a list of collectives: the rank stands in its own code from here on."""


@dataclass
class Ranks:
    """A world of ranks in groups."""

    groups: Mapping[str, Sequence[int]]
    programs: dict[int, list[Call]]
    broken: Callable[[str, int], frozenset[int]] = lambda _group, _number: frozenset()
    """Members for which a collective never ends, however many have begun it."""
    at: dict[int, int] = field(default_factory=dict)
    begun: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    stuck: set[int] = field(default_factory=set)

    def run(self) -> None:
        """Let all go on until nobody can."""
        ready = list(self.programs)
        self.at = dict.fromkeys(self.programs, -1)
        arrived: dict[tuple[str, int], dict[int, str]] = {}
        while ready:
            rank = ready.pop()
            self.at[rank] += 1
            program = self.programs[rank]
            if self.at[rank] >= len(program) or program[self.at[rank]] == STOP:
                continue
            group, operation = program[self.at[rank]]
            names = self.begun.setdefault((rank, group), [])
            names.append(operation)
            number = len(names)
            inside = arrived.setdefault((group, number), {})
            inside[rank] = operation
            if len(inside) == len(self.groups[group]) and len(set(inside.values())) == 1:
                never = self.broken(group, number)
                ready += [each for each in inside if each not in never]

    def pending(self, rank: int) -> Call | None:
        """Return the collective in which a rank is."""
        program, at = self.programs[rank], self.at[rank]
        return program[at] if at < len(program) and program[at] != STOP else None

    def activity(self, rank: int) -> Activity:
        """Return what a rank says."""
        call, states = self.pending(rank), []
        for group, members in self.groups.items():
            if rank in members:
                names = self.begun.get((rank, group), [])
                is_in = call is not None and call[0] == group
                pending, what = (len(names), names[-1]) if is_in else (-1, "")
                text, last = rank_text(members), tuple(names[-MAX_LAST:])
                states.append(GroupState(group, text, len(names), pending, what, last))
        shown = LOADS if call is None else replace(WAITS, what=call[1])
        return replace(shown, groups=tuple(states), num_groups=len(states))

    def witnesses(self, ranks_per_pod: int = 1) -> list[Witness]:
        """Return what all say."""
        return [Witness(rank, f"p{rank // ranks_per_pod}", self.activity(rank)) for rank in self.programs]


def grid(num_tp: int, num_dp: int) -> dict[str, range]:
    """Return the groups of tensor and data parallelism, and of all."""
    size = num_tp * num_dp
    tp = {f"tp{row}": range(row * num_tp, (row + 1) * num_tp) for row in range(num_dp)}
    dp = {f"dp{column}": range(column, size, num_tp) for column in range(num_tp)}
    return {"all": range(size), **tp, **dp}


def steps(num_tp: int, num_dp: int, num_steps: int) -> dict[int, list[Call]]:
    """Return what each rank of such a grid does in some steps."""
    return {
        rank: [
            (f"tp{rank // num_tp}", "all_reduce"),
            (f"tp{rank // num_tp}", "all_gather"),
            (f"dp{rank % num_tp}", "reduce_scatter"),
            ("all", "all_reduce"),
        ]
        * num_steps
        for rank in range(num_tp * num_dp)
    }
