"""Rank assignment at scale, in turn with the reference's Tree from PyPI: `python benchmarks/assignment.py`.

Tree: root / NVLink domain of 72 ranks / rack of 24 / host of 8. With spares, a domain has 64 active ranks and a spare
host. Figures are CPU milliseconds of one core (the machine may be shared), medians; wall time is in the JSON file. The
reference spends its time on every rank, ours is spent once. The environment of the reference is made under .cache/.
Exits with 1 when a bar is missed or an answer differs.
"""

import argparse
import gc
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from unbroken_core.protocol.messages import Plan, RankPlan
from unbroken_core.protocol.wire import encode
from unbroken_core.ranks.tree import Place, RankTree, TreePlan
from unbroken_core.ranks.tree.world import RankedWorld
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import RankReason, Role

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "nvrx"
REFERENCE = "nvidia-resiliency-ext==0.4.1"
RANKS_PER_POD, PODS_PER_RACK, PODS_PER_DOMAIN = 8, 3, 9
BAR_RANKS = 131_072
SIZES = (1_024, 8_192, 65_536, BAR_RANKS, 1_048_576)
FIRST, HOST, HOSTS, SHIFT = (
    "first plan",
    "1 dead host, spare near",
    "64 dead hosts",
    "1 of 64 ranks dead, no spare (2,048)",
)
BARS_MS = {FIRST: 400, HOST: 2, HOSTS: 15, SHIFT: 120}
BAR_MEMORY_MB, BAR_BYTES = 200, 100


@dataclass
class Row:
    """One case at one size; milliseconds."""

    case: str
    num_ranks: int
    ours_ms: float
    ours_wall_ms: float
    reference_ms: float | None = None
    reference_wall_ms: float | None = None
    bytes_a_changed_rank: float | None = None
    num_changed: int = 0
    samples_ms: list[float] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------- ours


def layers(has_spares: bool) -> list[Layer]:
    """Return the layers of the benchmark's tree."""
    return [
        Layer("root", min_ranks=1, replace_from=True),
        Layer("nvlink", min_ranks=1, max_ranks=64 if has_spares else None, replace_from=True),
        Layer("rack", min_ranks=1, replace_from=True),
        Layer("host", min_ranks=8, replace_from=True),
    ]


def pods(num_ranks: int) -> list[Place]:
    """Return the pods, as their labels give them."""
    return [
        Place(
            f"8f14e45f-ceea-467f-ab5c-{pod:012d}",
            (f"nvl-{pod // PODS_PER_DOMAIN}", f"rack-{pod // PODS_PER_RACK}", f"host-{pod}"),
            RANKS_PER_POD,
        )
        for pod in range(num_ranks // RANKS_PER_POD)
    ]


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return (result, CPU ms, wall ms)."""
    # A service that holds a large tree does the same after building it; the reference's driver, too.
    gc.collect()
    gc.freeze()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    result = call()
    return result, (time.process_time() - cpu_s) * 1e3, (time.perf_counter() - wall_s) * 1e3


def first_plan(places: list[Place], has_spares: bool) -> RankTree:
    """Build the tree and hand out the first ranks."""
    tree = RankTree(layers(has_spares), places)
    tree.start()
    return tree


def lose_and_plan(tree: RankTree, losses: list[tuple[str, list[int] | None]]) -> TreePlan:
    """Count losses and cut the plan."""
    for key, local_ranks in losses:
        tree.lose(key, local_ranks)
    return tree.plan()


def sent_bytes(tree: RankTree, plan: TreePlan) -> int:
    """Return the bytes of the messages that carry the changed ranks to their pods."""
    by_place: dict[str, list[RankPlan]] = {}
    for change in plan:
        if change.reason is not RankReason.LOST:
            by_place.setdefault(change.place, []).append(RankPlan(change.local_rank, change.after, change.reason))
    return sum(
        len(
            encode(
                Plan(1, 7, _role(ranks), plan.world_size, "10.244.117.23", 39291, tuple(ranks), tree.places[key].path)
            )
        )
        for key, ranks in by_place.items()
    )


def _role(ranks: list[RankPlan]) -> Role:
    return Role.SPARE if all(rank.rank is None for rank in ranks) else Role.ACTIVE


def losses_of(case: str, num_ranks: int, turn: int) -> list[tuple[str, list[int] | None]]:
    """Return what is lost: other hosts in each turn."""
    keys = [place.key for place in pods(num_ranks)]
    if case == HOST:
        return [(keys[(turn * PODS_PER_DOMAIN * 7) % (len(keys) - PODS_PER_DOMAIN)], None)]
    if case == HOSTS:
        step = PODS_PER_DOMAIN * max(1, len(keys) // PODS_PER_DOMAIN // 64)
        return [(key, None) for key in keys[turn % 8 :: step][:64]]
    num_dead = min(2_048, num_ranks // 64)
    step = len(keys) // num_dead
    return [(key, [3]) for key in keys[turn % step :: step][:num_dead]]


# -------------------------------------------------------------------------------------------------------- reference


class Reference:
    """The driver's process."""

    def __init__(self, python: Path) -> None:
        driver = Path(__file__).parent / "systems" / "assignment_reference.py"
        self._process = subprocess.Popen(
            [str(python), "-W", "ignore", str(driver)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("reference: want pipes, got none")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"reference: want an answer, got exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)


def make_environment() -> Path:
    """Return the interpreter of an environment with the reference, made when missing; torch is this environment's."""
    python = CACHE / "bin" / "python"
    if not (CACHE / "done").exists():
        say(f"making {CACHE.relative_to(ROOT)} with {REFERENCE}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(CACHE)], check=True)
        install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*install, "--no-deps", REFERENCE], check=True, stderr=subprocess.DEVNULL)
        subprocess.run(
            [*install, "--no-deps", "psutil", "packaging", "PyYAML", "defusedxml", "nvidia-ml-py"],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        (site,) = (CACHE / "lib").glob("python*/site-packages")
        torch = importlib.util.find_spec("torch")
        if torch is None or torch.origin is None:
            raise SystemExit("assignment: want torch in this environment (the reference imports it), got none")
        (site / "torch-of-the-project.pth").write_text(f"{Path(torch.origin).parent.parent}\n")
        (CACHE / "done").touch()
    return python


def reference_layers(case: str) -> list[list[Any]]:
    """Return the benchmark's layers as the driver takes them."""
    return [
        [layer.min_ranks, layer.max_ranks, "R" if layer.replace_from else ""] for layer in layers(case in (HOST, HOSTS))
    ]


# -------------------------------------------------------------------------------------------------------- measuring


def measure(num_ranks: int, turns: int, reference: Reference | None) -> Iterator[Row]:
    """Measure each case of one size, ours and the reference in turn."""
    places = pods(num_ranks)
    paths = [list(place.path) for place in places for _ in range(RANKS_PER_POD)]
    for case in (FIRST, HOST, HOSTS, SHIFT):
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        plan: TreePlan | None = None
        tree: RankTree | None = None
        for turn in range(turns):
            if reference is not None:
                answer = reference.ask(do="build", layers=reference_layers(case), paths=paths, rule=None)
            if case == FIRST:
                tree = None
                tree, *spent = timed(partial(first_plan, places, False))
            else:
                fresh = first_plan(places, case in (HOST, HOSTS))
                losses = losses_of(case, num_ranks, turn)
                plan, *spent = timed(partial(lose_and_plan, fresh, losses))
                tree = fresh
                if reference is not None:
                    index = {place.key: number * RANKS_PER_POD for number, place in enumerate(places)}
                    dead = [index[key] + local for key, ranks in losses for local in (ranks or range(RANKS_PER_POD))]
                    answer = reference.ask(do="lose-initial", ranks=dead)
            ours.append((spent[0], spent[1]))
            if reference is not None:
                theirs.append((answer["cpu_s"] * 1e3, answer["wall_s"] * 1e3))
        yield _row(case, num_ranks, ours, theirs, tree, plan)


def _row(  # noqa: PLR0917 - what was measured of one case
    case: str,
    num_ranks: int,
    ours: list[tuple[float, float]],
    theirs: list[tuple[float, float]],
    tree: RankTree | None,
    plan: TreePlan | None,
) -> Row:
    row = Row(case, num_ranks, statistics.median(cpu for cpu, _ in ours), statistics.median(wall for _, wall in ours))
    row.samples_ms = [round(cpu, 3) for cpu, _ in ours]
    if theirs:
        row.reference_ms = statistics.median(cpu for cpu, _ in theirs)
        row.reference_wall_ms = statistics.median(wall for _, wall in theirs)
    if plan is not None and tree is not None:
        row.num_changed = sum(1 for reason in plan.reasons if reason is not RankReason.LOST)
        row.bytes_a_changed_rank = sent_bytes(tree, plan) / max(1, row.num_changed)
    return row


def memory_mb(num_ranks: int) -> float:
    """Return how much a process grows by holding a tree, in MB of resident memory; measured in a fresh process."""
    code = f"import benchmarks.assignment as a; print(a.grown_mb({num_ranks}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "core")])}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout)


def grown_mb(num_ranks: int) -> float:
    """Return the resident memory that building a tree adds, its input and what the allocator keeps included."""
    before = resident_mb()
    tree = first_plan(pods(num_ranks), True)
    return (resident_mb() - before) if len(tree) else 0.0


def resident_mb() -> float:
    """Return this process' resident memory in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# ----------------------------------------------------------------------------------------------------- same answers


def random_case(chance: random.Random) -> tuple[list[Layer], list[tuple[str, ...]], int | None, list[int]]:
    """Return a case in which the reference is right: no choice between spares, no rule after a rule.

    Layers, paths by initial rank, divisor, and how many ranks die in each step.
    """
    depth = chance.randint(1, 4)
    num_ranks = chance.randint(2, 40)
    widths = sorted((chance.randint(1, 12) for _ in range(depth - 1)), reverse=True)
    paths = [tuple(str(rank // width) for width in widths) for rank in range(num_ranks)]
    found = [
        Layer(
            f"{level}",
            min_ranks=chance.choice([1, 1, 1, 2, 3]),
            max_ranks=None,
            replace_from=chance.random() < 0.6,
            close_gaps=chance.random() < 0.6,
        )
        for level in range(depth)
    ]
    kind = chance.choice(["none", "spare", "rule"])
    if kind == "spare" and num_ranks > found[0].min_ranks:
        limit = max(num_ranks - 1, found[0].min_ranks)
        found[0] = Layer(
            "0",
            min_ranks=found[0].min_ranks,
            max_ranks=limit,
            replace_from=found[0].replace_from,
            close_gaps=found[0].close_gaps,
        )
    steps = 1 if kind == "rule" else chance.randint(1, 5)
    divisor = None
    if kind == "rule":
        # Nobody is set aside in the first step: later the reference would start from the world that it cut before.
        divisor = chance.choice([number for number in (1, 2, 3, 4) if num_ranks % number == 0])
        found = [
            Layer(layer.name, min_ranks=1, replace_from=layer.replace_from, close_gaps=layer.close_gaps)
            for layer in found
        ]
    return found, paths, divisor, [chance.randint(0, 5) for _ in range(steps)]


def differences(reference: Reference, num_cases: int) -> list[str]:
    """Return one line for each random case in which ours and the reference do not agree to the rank."""
    found = []
    for seed in range(num_cases):
        chance = random.Random(seed)
        names, paths, divisor, deaths = random_case(chance)
        rule = None if divisor is None else (lambda size, divisor=divisor: size // divisor * divisor)
        world = RankedWorld(names, dict(enumerate(paths)), rule)
        flags = [("R" if layer.replace_from else "") + ("B" if layer.close_gaps else "") for layer in names]
        request = [[layer.min_ranks, layer.max_ranks, flag] for layer, flag in zip(names, flags, strict=True)]
        world.step(())
        answer = reference.ask(do="build", layers=request, paths=paths, rule=divisor, ranks_wanted=True)
        history = [_compare(world, answer["ranks"])]
        for number in deaths:
            if not world.world_size:
                break
            dead = chance.sample(range(world.world_size), min(number, world.world_size))
            if len(dead) == world.world_size:
                break
            world.step(dead)
            history.append(_compare(world, reference.ask(do="lose", ranks=dead, ranks_wanted=True)["ranks"]))
        found += [f"case {seed}, step {step}: {text}" for step, text in enumerate(history) if text][:1]
    return found


def _compare(world: RankedWorld, theirs: list[int | None]) -> str:
    ours = [standing.active_rank if (standing := world.standing(rank)) else None for rank in range(len(theirs))]
    return "" if ours == theirs else f"ours {ours}, reference {theirs}"


# --------------------------------------------------------------------------------------------------------- reporting


def say(text: str) -> None:
    """Tell the person who waits."""
    print(f"assignment: {text}", file=sys.stderr, flush=True)


def table(rows: list[Row], memory: float) -> str:
    """Return the results as Markdown."""
    lines = [
        "| case | ranks | ours, ms | reference, ms | ratio | bar, ms | changed ranks | bytes a changed rank |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        bar = str(BARS_MS[row.case]) if row.num_ranks == BAR_RANKS else ""
        theirs = "-" if row.reference_ms is None else f"{row.reference_ms:.1f}"
        ratio = "-" if row.reference_ms is None else f"{row.reference_ms / row.ours_ms:.0f}"
        sent = "-" if row.bytes_a_changed_rank is None else f"{row.bytes_a_changed_rank:.0f}"
        cells = (row.case, f"{row.num_ranks:,}", f"{row.ours_ms:.2f}", theirs, ratio, bar, f"{row.num_changed:,}", sent)
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"\nMemory of the tree at {BAR_RANKS:,} ranks: {memory:.0f} MB (bar: {BAR_MEMORY_MB} MB).")
    return "\n".join(lines)


def missed_bars(rows: list[Row], memory: float) -> list[str]:
    """Return one line for each bar that is missed."""
    missed = [
        f"{row.case}: want at most {BARS_MS[row.case]} ms, got {row.ours_ms:.2f}"
        for row in rows
        if row.num_ranks == BAR_RANKS and row.ours_ms > BARS_MS[row.case]
    ]
    missed += [
        f"{row.case}, {row.num_ranks} ranks: want at most {BAR_BYTES} bytes a rank, got {row.bytes_a_changed_rank:.0f}"
        for row in rows
        if row.bytes_a_changed_rank is not None and row.bytes_a_changed_rank > BAR_BYTES
    ]
    if memory > BAR_MEMORY_MB:
        missed.append(f"memory: want at most {BAR_MEMORY_MB} MB, got {memory:.0f}")
    return missed


def main() -> None:
    """Measure, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of ranks")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each case")
    parser.add_argument("--cases", type=int, default=300, help="random cases compared with the reference")
    parser.add_argument("--without-reference", action="store_true", help="measure ours alone")
    parser.add_argument("--reference-up-to", type=int, default=BAR_RANKS, help="largest size for the reference")
    parser.add_argument("--json", type=Path, default=ROOT / ".cache" / "assignment.json", help="where the figures go")
    options = parser.parse_args()
    reference = None if options.without_reference else Reference(make_environment())
    different = [] if reference is None else differences(reference, options.cases)
    if reference is not None:
        say(f"{options.cases} random cases: {len(different)} differ from the reference")
    rows: list[Row] = []
    for size in options.sizes:
        say(f"measuring {size:,} ranks")
        peer = reference if size <= options.reference_up_to else None
        rows += measure(size, options.turns if size <= BAR_RANKS else 1, peer)
    memory = memory_mb(BAR_RANKS)
    if reference is not None:
        reference.close()
    print(table(rows, memory))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "rows": [asdict(row) for row in rows],
        "memory_mb": memory,
        "cases": options.cases,
        "different": different,
    }
    options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    problems = [*different, *missed_bars(rows, memory)]
    for problem in problems:
        say(problem)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
