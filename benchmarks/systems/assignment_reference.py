"""The reference's Tree, driven in one process; run by benchmarks/assignment.py in an environment of its own.

Reads one JSON request a line and answers with one line each:
    {"do": "build", "layers": [[min, max, flags]], "paths": [[key, ...]], "rule": divisor or null}
    {"do": "lose", "ranks": [rank among the living, ...]}
    {"do": "lose-initial", "ranks": [initial rank, ...]}
Answers have cpu_s and wall_s of the call alone, the active world size, and with "ranks": true the active rank by
initial rank.
"""

import gc
import json
import sys
import time
import warnings
from typing import Any

warnings.simplefilter("ignore")

from nvidia_resiliency_ext.inprocess import rank_assignment as reference  # noqa: E402 - warns at import, with any filter set later
from nvidia_resiliency_ext.inprocess.state import Mode, State  # noqa: E402 - see above


class Store:
    """Answers the exchange of the first call at once, with what all ranks would have written."""

    def __init__(self, states: list[Any], keys: list[list[str]]) -> None:
        self._states, self._keys = states, keys

    def send_state(self, state: Any, rank: int) -> None:
        """Ignore."""

    def send_key(self, key: Any, rank: int) -> None:
        """Ignore."""

    def get_states(self, ranks: Any) -> list[Any]:
        """Return the states of all ranks."""
        return self._states

    def get_keys(self, ranks: Any) -> list[list[str]]:
        """Return the keys of all ranks."""
        return self._keys


class Driver:
    """One tree, seen by the lowest rank that lives."""

    def __init__(self) -> None:
        self._tree: Any = None

    def build(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make a tree and let it hand out the first ranks."""
        flags = {"": None, "R": reference.LayerFlag.RESERVE, "B": reference.LayerFlag.BACKFILL}
        flags["RB"] = flags["R"] | flags["B"]
        layers = [reference.Layer(low, high, "", flags[flag]) for low, high, flag in request["layers"]]
        divisor = request["rule"]
        rule = None if divisor is None else lambda size: size // divisor * divisor
        paths = request["paths"]
        store = Store([State(rank, len(paths)) for rank in range(len(paths))], [["root", *path] for path in paths])
        self._tree = reference.Tree(layers, rule)
        context = reference.RankAssignmentCtx(State(0, len(paths)), store, set())
        return self._call(context)

    def lose(self, request: dict[str, Any]) -> dict[str, Any]:
        """Terminate ranks and let the tree assign the others again."""
        ranks = set(request["ranks"])
        leaves = self._tree.init_rank_map
        if request["do"] == "lose-initial":
            ranks = {leaves[initial].state.rank for initial in ranks}
        alive = next(leaf.state for leaf in leaves.values() if leaf.state.mode != Mode.TERMINATED)
        state = State(alive.rank, alive.world_size, initial_rank=alive.initial_rank)
        return self._call(reference.RankAssignmentCtx(state, None, ranks))

    def _call(self, context: Any) -> dict[str, Any]:
        gc.collect()
        gc.freeze()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        try:
            self._tree(context)
        except reference.RankDiscarded:
            pass
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        return {"cpu_s": cpu_s, "wall_s": wall_s}

    def ranks(self) -> list[int | None]:
        """Return the active rank by initial rank."""
        leaves = self._tree.init_rank_map
        return [leaves[initial].state.active_rank for initial in sorted(leaves)]


def main() -> None:
    """Answer requests until the input ends."""
    driver = Driver()
    for line in sys.stdin:
        request = json.loads(line)
        answer = driver.build(request) if request["do"] == "build" else driver.lose(request)
        if request.get("ranks_wanted"):
            answer["ranks"] = driver.ranks()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
