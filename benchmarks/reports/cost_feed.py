"""Pure: what `unbroken size` simulates of each system, from the rows of lost_time.py and the assumptions of cost.yaml.

What is wrong with either is one line with the field's name.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lost_time import KINDS, SYSTEMS
from reports.lost_time_terms import PHASES, TERMS
from systems.lost_time_job import SOFT_S
from unbroken_cli.sizing.fields import Fields, refuse
from unbroken_cli.sizing.formulas import daly_interval_s, poisson_quantile
from unbroken_core.vocabulary.errors import InputError

MAX_BYTES = 4 << 20
MAX_ROWS = 200
MAX_FAULTS = 1000
MAX_S = 3600.0
"""Of a part of one fault on a laptop: more is no measurement."""
SUM_S = 0.005
"""Parts are rounded to 0.1 ms each."""
BUCKETS = 1.3
"""Upper bound of a bucket by its lower."""
SHORTEST_S = 0.01
RUNG = {"exception": "in-process", "hang": "in-process", "sigkill": "process", "pod-lost": "pod"}
"""Names of the costs in the simulation's input; what each system does then is its own matter."""
_ASSUMPTIONS = (
    *("groupInit", "modelBuild", "newProcess", "newPods", "podsPerSecond", "restoreDisk", "restoreMemory"),
    *("diskBlocking", "memoryBlocking", "backgroundBlocking", "backgroundLeast", "memoryToDisk", "hangTimeout"),
    *("collectiveTimeout", "repair"),
)


@dataclass(frozen=True)
class System:
    """What a laptop does not show of a system."""

    name: str
    new_process: frozenset[str]
    """Kinds of faults after which training waits for a process that starts from nothing."""
    has_memory: bool = False
    has_new_pods: bool = False


@dataclass(frozen=True)
class Cluster:
    """For what the figures are carried over."""

    gpus: int
    rate: float
    """Faults per 1,000 node-days."""
    in_background: bool = False
    """Checkpoints on the disk are written by torch's async_save."""


_ALL = frozenset(KINDS)
MODELS = {
    "unbroken-memory": System("unbroken-memory", frozenset({"sigkill"}), has_memory=True),
    "unbroken-disk": System("unbroken-disk", frozenset({"sigkill"})),
    "unbroken-process": System("unbroken-process", _ALL),
    "torchrun": System("torchrun", _ALL),
    # Its processes wait in reserve.
    "nvrx": System("nvrx", frozenset()),
    "ft_launcher": System("ft_launcher", _ALL),
    "recreate": System("recreate", _ALL, has_new_pods=True),
}


@dataclass(frozen=True)
class Measured:
    """One system and one kind of fault."""

    detect_s: tuple[float, ...]
    regroup_s: tuple[float, ...]
    """From then until all workers are in a new process group."""
    reason: str = ""
    """Why there are none."""

    @property
    def has_failed(self) -> bool:
        """Whether it was tried, and did not come back."""
        return self.reason.startswith("did not")


@dataclass(frozen=True)
class Settings:
    """What cost.yaml says."""

    sizes: tuple[int, ...]
    duration_s: float
    runs: int
    seed: int
    gpus_per_node: int
    faults: tuple[tuple[str, str, float, str], ...]
    """Name, what it hits, its share of all, and the kind that was measured."""
    rates: tuple[tuple[str, float], ...]
    """Per 1,000 node-days."""
    assumptions: Mapping[str, float]
    """Seconds, but for podsPerSecond."""
    words: tuple[tuple[str, str, str, str], ...]
    """Of each assumption: its name, value, what it is for, its source."""


def read_rows(data: bytes, where: str) -> dict[tuple[str, str], Measured]:
    """Return what was measured by system and kind. Raises InputError."""
    if len(data) > MAX_BYTES:
        raise InputError(f"{where}: want at most {MAX_BYTES} bytes, got {len(data)}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ROWS:
        raise InputError(f"{where}: want a list of 1 to {MAX_ROWS} rows, got {type(value).__name__}")
    found = {}
    for index, item in enumerate(value):
        key, measured = _row(f"{where}: rows[{index}]", item)
        if key in found:
            raise InputError(f"{where}: rows[{index}]: want one row of {' × '.join(key)}, got another")
        found[key] = measured
    for system in SYSTEMS:
        for kind in KINDS:
            if (system, kind) not in found:
                raise InputError(f"{where}: rows: want {system} × {kind}, got none; measure it with lost_time.py")
    return found


def _row(where: str, value: Any) -> tuple[tuple[str, str], Measured]:
    names = ("system", "fault", "lost_s", "steps_redone", "terms", "phases", "step_s", "faults", "reason")
    fields = Fields(where, value, names)
    key = fields.word("system", SYSTEMS), fields.word("fault", KINDS)
    reason = fields.raw("reason", "")
    faults = fields.raw("faults", [])
    if not isinstance(faults, list) or len(faults) > MAX_FAULTS:
        refuse(fields.path("faults"), f"a list of at most {MAX_FAULTS}", faults)
    if not isinstance(reason, str) or bool(reason) == bool(faults):
        refuse(fields.path("reason"), "either a reason or faults", reason)
    parts = [_fault(f"{where}.faults[{number}]", fault) for number, fault in enumerate(faults)]
    return key, Measured(tuple(one[0] for one in parts), tuple(one[1] for one in parts), reason[:300])


def _fault(where: str, value: Any) -> tuple[float, float]:
    """Return how long it took to know of a fault, and from then to regroup."""
    fields = Fields(where, value, ("lost_s", "steps_redone", "terms", "phases", "is_known"))
    lost_s = fields.number("lost_s", 0.0, 4 * MAX_S)
    found = {}
    for name, keys in (("terms", TERMS), ("phases", (*PHASES.values(), "redo"))):
        parts = Fields(fields.path(name), fields.raw(name), keys)
        found[name] = {key: parts.number(key, -1e-9, MAX_S) for key in keys}
        total = math.fsum(found[name].values())
        if abs(total - lost_s) > SUM_S:
            refuse(fields.path(name), f"parts that sum to lost_s ({lost_s:g})", round(total, 4))
    terms, phases = found["terms"], found["phases"]
    # What the user's model and its checkpoint take is assumed; a line that is read late may hide a bit of the rest.
    regroup_s = terms["restart"] + terms["waiting"] - phases["model"] - phases["restore"]
    return max(terms["detect"], 0.0), max(regroup_s, 0.0)


def read_settings(value: Any) -> Settings:
    """Return what cost.yaml says. Raises InputError."""
    names = ("sizes", "duration", "runs", "seed", "gpusPerNode", "faults", "rates", "assumptions")
    top = Fields("", value, names)
    per_node = top.whole("gpusPerNode", 1, 1024)
    sizes = top.items("sizes")
    for index, size in enumerate(sizes):
        if isinstance(size, bool) or not isinstance(size, int) or not per_node <= size <= 1_000_000 or size % per_node:
            refuse(f"sizes[{index}]", f"GPUs from {per_node} to 1000000, a multiple of gpusPerNode", size)
    faults = [_kind(f"faults[{index}]", item) for index, item in enumerate(top.items("faults"))]
    rates = [_rate(f"rates[{index}]", item) for index, item in enumerate(top.items("rates"))]
    for name, found in (("sizes", sizes), ("faults", faults), ("rates", rates)):
        if not found:
            refuse(name, "at least one", found)
    total = sum(count for _name, _hits, count, _kind in faults)
    assumptions, words = _assumptions(Fields("assumptions", top.raw("assumptions"), _ASSUMPTIONS))
    return Settings(
        tuple(sizes),
        top.seconds("duration", least=3600.0),
        top.whole("runs", 2, 1000),
        top.whole("seed", 1, 2**31),
        per_node,
        tuple((name, hits, count / total, kind) for name, hits, count, kind in faults),
        tuple(rates),
        assumptions,
        words,
    )


def _kind(where: str, value: Any) -> tuple[str, str, int, str]:
    fields = Fields(where, value, ("name", "hits", "count", "as"))
    name, hits = str(fields.raw("name"))[:60], fields.word("hits", ("gpu", "node", "software"))
    return name, hits, fields.whole("count", 1, 1_000_000), fields.word("as", KINDS)


def _rate(where: str, value: Any) -> tuple[str, float]:
    fields = Fields(where, value, ("name", "rate", "source"))
    return str(fields.raw("name"))[:60], fields.number("rate", 0.0, 100_000.0)


def _assumptions(fields: Fields) -> tuple[dict[str, float], tuple[tuple[str, str, str, str], ...]]:
    found, words = {}, []
    for name in _ASSUMPTIONS:
        one = Fields(fields.path(name), fields.raw(name), ("value", "for", "source"))
        if name == "podsPerSecond":
            found[name] = one.number("value", 0.0, 1_000_000)
        else:
            found[name] = one.seconds("value")
        words.append((name, str(one.raw("value")), str(one.raw("for"))[:300], str(one.raw("source"))[:300]))
    return found, tuple(words)


def scenario_of(
    system: System,
    rows: Mapping[tuple[str, str], Measured],
    settings: Settings,
    cluster: Cluster,
) -> dict[str, Any]:
    """Return an input of `unbroken size`."""
    gpus, rate = cluster.gpus, cluster.rate
    given, nodes = settings.assumptions, gpus // settings.gpus_per_node
    losing = sum(share for _name, _hits, share, kind in settings.faults if kind == "pod-lost")
    out = rate / (1000 * 86400) * nodes * losing * given["repair"]
    mtbf_s = 1000 * 86400 / (rate * nodes)
    return {
        "job": {
            "name": system.name, "gpus": gpus, "gpusPerNode": settings.gpus_per_node, "duration": settings.duration_s,
        },
        "spares": {"shared": min(poisson_quantile(out, 0.99), nodes)},
        "faults": [
            {
                "name": name,
                "hits": hits,
                "rate": rate * share,
                "rungs": {RUNG[kind]: 1},
                "detect": _detect(system, rows, given, kind),
                **({"repair": given["repair"]} if kind == "pod-lost" else {}),
            }
            for name, hits, share, kind in settings.faults
        ],
        "checkpoints": _checkpoints(system, given, mtbf_s, cluster.in_background),
        "restart": {
            RUNG[kind]: histogram_of(rows[system.name, kind].regroup_s, _added_s(system, given, kind, nodes))
            for kind in ("exception", "sigkill", "pod-lost")
        },
    }  # fmt: skip


def _detect(system: System, rows: Mapping[tuple[str, str], Measured], given: Mapping[str, float], kind: str) -> Any:
    measured = rows[system.name, kind]
    if kind != "hang":
        return histogram_of(measured.detect_s, 0.0)
    if not measured.detect_s:
        return given["collectiveTimeout"]
    # The laptop's timeout is a setting, not a cost.
    return histogram_of([seconds - SOFT_S for seconds in measured.detect_s], given["hangTimeout"])


def _added_s(system: System, given: Mapping[str, float], kind: str, nodes: int) -> float:
    """Return what a restart takes on a cluster, beside what was measured."""
    added_s = given["groupInit"] + given["modelBuild"]
    if kind in system.new_process:
        added_s += given["newProcess"]
    if system.has_new_pods:
        added_s += given["newPods"] + nodes / given["podsPerSecond"]
    return added_s


def _checkpoints(
    system: System, given: Mapping[str, float], mtbf_s: float, in_background: bool
) -> list[dict[str, Any]]:
    disk = {"name": "disk", "restore": given["restoreDisk"], "survives": "job"}
    if system.has_memory:
        blocking_s = given["memoryBlocking"]
        every_s = max(daly_interval_s(mtbf_s, blocking_s), 2 * blocking_s)
        memory = {"name": "memory", "every": every_s, "blocking": blocking_s, "survives": "rack"}
        later = {**disk, "every": given["memoryToDisk"], "blocking": 0.0}
        return [{**memory, "restore": given["restoreMemory"]}, later]
    blocking_s = given["backgroundBlocking" if in_background else "diskBlocking"]
    least_s = given["backgroundLeast"] if in_background else 2 * blocking_s
    return [{**disk, "every": max(daly_interval_s(mtbf_s, blocking_s), least_s), "blocking": blocking_s}]


def histogram_of(seconds: Sequence[float], added_s: float) -> dict[str, dict[float, int]]:
    """Return a histogram of what was measured and something that is always added, in narrow buckets."""
    counts: dict[int, int] = {}
    for value in seconds:
        number = math.ceil(math.log(max(value, SHORTEST_S)) / math.log(BUCKETS))
        counts[number] = counts.get(number, 0) + 1
    buckets: dict[float, int] = {}
    for number in sorted(counts):
        # Below is nothing: without this bucket the next one would begin where the last one ends.
        buckets.setdefault(added_s + BUCKETS ** (number - 1), 0)
        buckets[added_s + BUCKETS**number] = counts[number]
    return {"histogram": buckets}
