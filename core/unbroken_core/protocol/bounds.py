"""The one table of bounds: how large each number, text and list of a message may be, whoever sent it.

The types say that `step` is an int; a trainer, or whoever holds a job's token, could send 2**70 all the same. So
`protocol.wire` refuses a message of which a part is out of its bounds, and says which, what it got and what it wants.
A field is looked up as `Message.field`, then as `field`, since a name means the same in all messages.

What is only right or wrong in a given job (a world larger than it, an iteration that nobody has given out) is checked
by its coordinator (`unbroken_core.coordinator.limits`). Messages for torchrun have a table of their own
(`torchrun_rounds.messages`), settings their rules (`settings`).
"""

import re
from collections.abc import Iterable
from typing import Union

from unbroken_core.protocol.log_rules.rules import MAX_PATTERN, MAX_RULE_NAME, MAX_RULES, MAX_SHOWN
from unbroken_core.protocol.settings import MAX_PODS, MAX_RANKS_PER_POD
from unbroken_core.vocabulary.checkpoints import (
    MAX_CANDIDATES,
    MAX_COPIES,
    MAX_COPIES_TOLD,
    MAX_FETCHES,
    MAX_FLOORS,
    MAX_LOADS,
    MAX_PINNED,
    MAX_RANGES,
    MAX_SOURCES,
)
from unbroken_core.vocabulary.findings import MAX_FINDINGS
from unbroken_core.vocabulary.names import NAME

MAX_NUMBER = (1 << 53) - 1
"""Highest step, iteration, term or other count: every reader of JSON, JavaScript's too, knows it exactly."""
MAX_CLAIMED = (1 << 31) - 1
"""Highest iteration, term and incarnation that is believed on the word of one pod. Those that a coordinator has given
out itself may be higher, so that a pod that claims this one leaves room for the next."""
MAX_SECONDS = 1e9
"""Thirty years."""
MAX_RANKS = 2 * MAX_PODS * MAX_RANKS_PER_POD
"""Workers of the largest job, spares included."""
MAX_RANK_SECONDS = MAX_SECONDS * MAX_RANKS
MAX_NAME = 512
"""Of pods, nodes, domains, jobs and health checks: twice what Kubernetes allows."""
MAX_KEYS = 64
"""Domains of a pod, or key functions of a script."""
MAX_DETAIL = 2000
"""Of one fault."""
MAX_SENTENCE = 16_384
"""Of what quotes such a detail, or an error of a script."""
MAX_BLOCKS = 1 << 18
"""Of a checkpoint that is copied to other pods: 256 GiB."""
MAX_PATH = 5000
"""A file's longest name in Linux, and a function's."""

MAX_PLACE = 100
"""Of a call, or a place in a script, as people read it."""

MAX_GROUPS = 16
"""Process groups of which a worker says how far it is."""
MAX_GROUP_TEXT = 256
"""Of the ranks of one."""
MAX_LAST = 4
"""Names of the last collectives of one."""
MAX_OPERATION = 48
"""Of such a name."""

Leaf = Union["Number", "Text"]


class Number:
    """From `low` to `high`, both included."""

    __slots__ = ("high", "low", "wanted")

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self.wanted = f"{low:.0f} to {high:.0f}"

    def fault(self, value: float) -> str:
        """Return what is wanted if this value is out of bounds, else ""."""
        return "" if self.low <= value <= self.high else self.wanted

    def fault_of_any(self, values: Iterable[object]) -> str:
        """Return what is wanted if one of these values is out of bounds, else ""; others than numbers do not count."""
        numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        return self.fault(min(numbers)) or self.fault(max(numbers)) if numbers else ""


class Text:
    """At most `most` characters; `pattern` says which."""

    __slots__ = ("most", "pattern", "wanted")

    def __init__(self, most: int, pattern: str = "", what: str = "") -> None:
        self.most = most
        self.wanted = f"at most {most} characters{f' of {what}' if what else ''}"
        self.pattern = pattern

    def fault(self, value: str) -> str:
        """Return what is wanted if this text is out of bounds, else ""."""
        if len(value) > self.most or (self.pattern and re.fullmatch(self.pattern, value, re.ASCII) is None):
            return self.wanted
        return ""

    def fault_of_any(self, values: Iterable[object]) -> str:
        """Return what is wanted if one of these texts is out of bounds, else ""; others than texts do not count."""
        return next((self.wanted for value in values if isinstance(value, str) and self.fault(value)), "")


class Items:
    """At most `most` items; the leaves of all of them, keys of an object included, are bounded alike."""

    __slots__ = ("leaves", "most")

    def __init__(self, most: int, *leaves: Leaf) -> None:
        self.most = most
        self.leaves = leaves

    def fault(self, value: Union[tuple[object, ...], dict[str, object]]) -> str:
        """Return what is wanted if this list or object is out of bounds, else ""."""
        if len(value) > self.most:
            return f"at most {self.most} items"
        if not self.leaves or not value:
            return ""
        found: list[object] = [*value]
        if isinstance(value, dict):
            found += value.values()
        elif isinstance(value[0], tuple):
            found = [leaf for item in value if isinstance(item, tuple) for leaf in item]
        wanted = (leaf.fault_of_any(found) for leaf in self.leaves)
        return next((f"in each item {fault}" for fault in wanted if fault), "")


Bound = Union[Number, Text, Items]

_COUNT = Number(0, MAX_NUMBER)
_INDEX = Number(-1, MAX_NUMBER)
"""-1: none."""
_SECONDS = Number(0, MAX_SECONDS)
_REST_S = Number(-MAX_SECONDS, MAX_SECONDS)
"""Of time that may be over."""
_RANK = Number(-1, MAX_RANKS)
_LOCAL_RANK = Number(-1, MAX_RANKS_PER_POD - 1)
_PORT = Number(0, (1 << 16) - 1)
_SIGNAL = Number(0, 64)
_NAME = Text(MAX_NAME)
_OF_KUBERNETES = Text(253, NAME.pattern, "a name of Kubernetes")
"""Who somebody is, in reports too. An operator refuses a report with any other name in it."""
_SENTENCE = Text(MAX_SENTENCE)
_HOST = Text(253, r"[A-Za-z0-9._:%\[\]-]*", "a host's name or address")
"""It becomes MASTER_ADDR of other pods' processes, which no environment with a NUL in it would let start."""
_NAMES = Items(MAX_KEYS, Text(MAX_SENTENCE))
"""A script's keys may be long."""
_HEAD = Text(8192, "[0-9a-f]*", "hexadecimal digits")
_OF_POD = Items(MAX_RANKS_PER_POD)

BOUNDS: dict[str, Bound] = {
    # Who: pods, places, processes.
    "protocol": _COUNT,
    "job": _NAME,
    "pod": _OF_KUBERNETES,
    "pod_uid": _OF_KUBERNETES,
    "node": _NAME,
    "session": _NAME,
    "role": Text(MAX_NAME),
    "domains": _NAMES,
    "ranks_per_pod": Number(0, MAX_RANKS),
    "local_rank": _LOCAL_RANK,
    "incarnation": _INDEX,
    "pid": Number(-1, MAX_CLAIMED),
    "host": _HOST,
    "port": _PORT,
    "workers": _OF_POD,
    "processes": Items(4 * MAX_RANKS_PER_POD),
    "places": Items(MAX_RANKS_PER_POD, _INDEX),
    "released": Items(MAX_RANKS_PER_POD, _LOCAL_RANK),
    # When: numbers that count up.
    "term": _COUNT,
    "iteration": _INDEX,
    "interrupted": _INDEX,
    "over": _INDEX,
    "planned": Items(MAX_RANKS_PER_POD, _INDEX),
    "number": _COUNT,
    "seq": _COUNT,
    "step": _INDEX,
    "max_step": _INDEX,
    "Halt.step": Number(0, 1 << 62),
    # Seconds.
    "detect_s": _SECONDS,
    "entered_ago_s": _SECONDS,
    "over_ago_s": _SECONDS,
    "step_ago_s": _SECONDS,
    "checkpoint_after_s": _SECONDS,
    "gained_s": _SECONDS,
    "ran_for_s": _SECONDS,
    "suspended_s": _SECONDS,
    "progress_s": _SECONDS,
    "checkpoint_s": _SECONDS,
    "redo_s": _SECONDS,
    "restart_s": _SECONDS,
    "waiting_s": _SECONDS,
    "open_s": _SECONDS,
    "progress_rank_s": Number(0.0, MAX_RANK_SECONDS),
    "held_rank_s": Number(0.0, MAX_RANK_SECONDS),
    "wanted_rank_s": Number(0.0, MAX_RANK_SECONDS),
    "Observation.gone": Items(4 * MAX_PODS),
    "heartbeat_interval_s": _SECONDS,
    "away_s": _SECONDS,
    "ago_s": _SECONDS,
    "lost_s": _SECONDS,
    "alone_s": _REST_S,
    "within_s": _REST_S,
    "grace_s": _SECONDS,
    # Worlds.
    "rank": _RANK,
    "ranks": Items(MAX_RANKS_PER_POD, _RANK),
    "world_size": Number(0, MAX_RANKS),
    "active_world_size": Number(0, MAX_RANKS),
    "spare_ranks": Number(0, MAX_RANKS),
    "master_host": _HOST,
    "master_port": _PORT,
    "origins": Items(MAX_RANKS_PER_POD, _LOCAL_RANK, Text(MAX_KEYS * MAX_NAME)),
    # What went wrong.
    "detail": Text(MAX_DETAIL),
    "stack": Items(64, Text(MAX_PATH)),
    "domain": _NAME,
    "replaced_by": Items(MAX_KEYS, _NAME),
    "stop_s": _SECONDS,
    "exit_code": Number(-64, 256),
    # What a worker does.
    "what": Text(MAX_PLACE),
    "call": Text(MAX_PLACE),
    "beside": Text(MAX_PLACE),
    "idle_s": _SECONDS,
    "ping_s": Number(-1, MAX_SECONDS),
    "sequence": _INDEX,
    "num_groups": _COUNT,
    "groups": Items(MAX_GROUPS),
    "GroupState.name": Text(64),
    "members": Text(MAX_GROUP_TEXT),
    "begun": _COUNT,
    "pending": _INDEX,
    "GroupState.what": Text(MAX_OPERATION),
    "last": Items(MAX_LAST, Text(MAX_OPERATION)),
    "Activity.stack": Items(24, Text(300)),
    "MainThread.stack": Items(64, Text(300)),
    "error": _SENTENCE,
    "reason": _SENTENCE,
    "message": _SENTENCE,
    "stack_signal": _SIGNAL,
    "signal": _SIGNAL,
    "checks": Items(256, _NAME),
    # What checks of devices find.
    "findings": Items(MAX_FINDINGS),
    "num_dropped": _COUNT,
    "check": Text(40, r"([a-z0-9]([a-z0-9_-]*[a-z0-9])?)?", "small letters, digits, - and _"),
    "entity": Text(128),
    "Finding.code": Text(64, r"[A-Za-z0-9_.-]*", "letters, digits, -, _ and ."),
    "action": Text(100),
    "Finding.message": Text(300),
    "seen": Number(1, 3),
    # Tests of pairs of pods.
    "gpus": Number(0, 1024),
    "side": Number(0, 1),
    "why": Text(300),
    # How busy workers are.
    "paces": _OF_POD,
    "window": _COUNT,
    "busy_s": _SECONDS,
    "step_s": _SECONDS,
    "window_s": _SECONDS,
    # What workers print.
    "rules": Items(MAX_RULES),
    "rule": Text(MAX_RULE_NAME),
    "pattern": Text(MAX_PATTERN),
    "every_s": _SECONDS,
    "marks": Items(MAX_RULES * MAX_RANKS_PER_POD),
    "at_s": _SECONDS,
    "looked_s": _SECONDS,
    "count": _COUNT,
    "line": Text(MAX_SHOWN),
    "num_skipped": _COUNT,
    # What scripts ask for. Whether it makes sense in the job is said by `ranks.rules`, for people.
    "max_ranks": Number(-MAX_NUMBER, MAX_NUMBER),
    "min_ranks": Number(-MAX_NUMBER, MAX_NUMBER),
    "divisible_by": Number(-MAX_NUMBER, MAX_NUMBER),
    "layers": Items(MAX_KEYS),
    "name": _NAME,
    "label": _NAME,
    "root_key": Text(MAX_SENTENCE),
    "sizes": Items(1024, Number(-MAX_NUMBER, MAX_NUMBER)),
    "code": Text(MAX_SENTENCE),
    "keys": _NAMES,
    "terminated": Items(MAX_RANKS, _RANK),
    "names": Items(MAX_RANKS),
    "Question.keys": Items(MAX_RANKS, _RANK),
    "Answer.workers": Items(MAX_RANKS, _RANK),
    # Copies of checkpoints.
    "Offer.head": _HEAD,
    "Sending.head": _HEAD,
    "checksums": Items(MAX_BLOCKS, Number(0, (1 << 32) - 1)),
    "first_block": Number(0, MAX_BLOCKS),
    "num_blocks": Number(0, MAX_BLOCKS),
    "ranges": Items(MAX_RANGES, Number(0, MAX_BLOCKS << 20)),
    # Checkpoints in memory.
    "arena": Text(64, r"[0-9a-f]*", "hexadecimal digits"),
    "holdings": Items(4 * MAX_RANKS_PER_POD),
    "place": _NAME,
    "shards": Items(MAX_RANKS_PER_POD, _RANK, Text(64, r"[0-9a-f]*", "hexadecimal digits")),
    "loads": Items(MAX_LOADS),
    "of_term": _COUNT,
    "of_iteration": _INDEX,
    "reached": _INDEX,
    "refused": Items(MAX_CANDIDATES, _INDEX, Text(MAX_DETAIL)),
    "candidates": Items(MAX_CANDIDATES),
    "sources": Items(MAX_SOURCES, _RANK, _NAME),
    "floors": Items(MAX_FLOORS),
    "given_up": Items(MAX_FLOORS, _INDEX),
    # Copies of them on other pods.
    "fetches": Items(MAX_FETCHES, _RANK, _NAME),
    "copies": Items(MAX_COPIES_TOLD),
    "Welcome.copies": Number(0, MAX_COPIES),
    "Copying.copies": Number(0, MAX_COPIES),
    "owner": _NAME,
    "uid": _NAME,
    "problems": Items(MAX_COPIES, Text(MAX_DETAIL)),
    "no_room": Text(MAX_DETAIL),
    "peers": Items(MAX_FETCHES),
    "keepers": Items(MAX_COPIES),
    "pinned": Items(MAX_PINNED, _INDEX),
    # What the disk has.
    "every": Number(1, MAX_NUMBER),
    "num_given_up": _COUNT,
    "problem": Text(MAX_DETAIL),
    "protected": Items(4, _INDEX),
    "next_protected": Items(4, _INDEX),
    "owners": Items(16, _NAME),
    "drop": Items(MAX_COPIES_TOLD, _NAME),
    "lost": Items(MAX_FETCHES, _NAME),
    "request": Text(4096),
    "certificate": Text(MAX_SENTENCE),
    "authority": Text(MAX_SENTENCE),
    # Between operator and rendezvous, and to a launcher.
    "pods": Items(4 * MAX_PODS),
    "uses": Items(65_536),
    "counted": Items(2, _COUNT),
    "environment": Items(1024, Text(MAX_SENTENCE)),
}
_OWN_CHECKS = frozenset(("JobSettings", "Timeouts", "RungBudget", "NodeReport", "Standing", "Rejected", "Limits"))
"""Whose values are checked elsewhere, in the words of who gave them."""
_REPORTS = frozenset(("JobStatus", "Recovery", "OtherFault", "PodStatus", "MemoryStatus", "HealthStatus", "PodFinding"))
"""What a rendezvous reports: the operator bounds it by the job's spec, and cuts off what is too much."""


def bound_of(kind: type, name: str) -> Bound | None:
    """Return the bound of a message's field; None where there is none."""
    if kind.__name__ in _OWN_CHECKS or kind.__name__ in _REPORTS:
        return None
    return BOUNDS.get(f"{kind.__name__}.{name}") or BOUNDS.get(name)
