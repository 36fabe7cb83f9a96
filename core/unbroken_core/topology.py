"""Where each pod is: a tree of domains with pods as the last level and workers as the leaves of a pod.

The shape of a path is fixed: one name for each layer of the job, outermost first. A layer whose name is missing ("" or
no entry) falls back to UNKNOWN, one domain of its own under the same parent: pods of unknown place are neighbours of
one another, come last in the order, and share nothing with a domain that a label names, even if its name is "unknown".

Adding, moving and removing a pod costs O(layers); the order of the pods is sorted on demand.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Union

UNKNOWN = "unknown"
"""Shown for a domain without a name."""

Key = tuple[tuple[int, int, str], ...]
Domain = Union[str, None]
Path = tuple[Domain, ...]
"""Domain names from the outermost layer inwards; None is the unknown domain. A prefix of a path names a domain."""

_CHUNKS = re.compile(r"\d+|\D+")


@lru_cache(maxsize=65_536)
def natural_key(name: str) -> Key:
    """Return a key that sorts `node-2` before `node-10`, and is different for different names."""
    chunks = [(0, int(chunk), "") if chunk.isdecimal() else (1, 0, chunk) for chunk in _CHUNKS.findall(name)]
    # Names such as a-1 and a-01 have the same numbers: the text itself decides.
    return (*chunks, (0, -1, name))


def domain_text(domain: Domain) -> str:
    """Return the name of a domain for people."""
    return UNKNOWN if domain is None else domain


@dataclass(frozen=True)
class _Leaf:
    path: Path
    key: tuple[tuple[int, Key], ...]


class Topology:
    """The pods of one job by domain."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._leaves: dict[str, _Leaf] = {}
        self._pods: dict[Path, dict[str, None]] = {}

    def __contains__(self, pod_uid: str) -> bool:
        return pod_uid in self._leaves

    def place(self, pod_uid: str, pod: str, domains: Iterable[str]) -> None:
        """Add a pod, or move it to other domains. More names than layers are ignored, missing ones are UNKNOWN."""
        named: list[Domain] = [name or None for name in domains][: self.num_layers]
        path: Path = (*named, *(None for _ in range(self.num_layers - len(named))))
        key = (*((1, ()) if name is None else (0, natural_key(name)) for name in path), (0, natural_key(pod)))
        leaf = _Leaf(path, key)
        if self._leaves.get(pod_uid) == leaf:
            return
        self.remove(pod_uid)
        self._leaves[pod_uid] = leaf
        for depth in range(self.num_layers + 1):
            self._pods.setdefault(path[:depth], {})[pod_uid] = None

    def remove(self, pod_uid: str) -> None:
        """Forget a pod; nothing happens when it is not there."""
        leaf = self._leaves.pop(pod_uid, None)
        if leaf is None:
            return
        for depth in range(self.num_layers + 1):
            pods = self._pods[leaf.path[:depth]]
            del pods[pod_uid]
            if not pods:
                del self._pods[leaf.path[:depth]]

    def path(self, pod_uid: str) -> Path:
        """Return the pod's domains, outermost first; the empty path (the root) for a pod that is not in the tree."""
        leaf = self._leaves.get(pod_uid)
        return () if leaf is None else leaf.path

    def names(self, pod_uid: str) -> tuple[str, ...]:
        """Return the names of the pod's domains for people."""
        return tuple(map(domain_text, self.path(pod_uid)))

    def ordered(self, pod_uids: Iterable[str]) -> list[str]:
        """Return the pods in the order of the tree; the uid decides between pods of one name and place."""
        leaves = self._leaves
        return sorted(pod_uids, key=lambda uid: (leaves[uid].key, uid))

    def pods_under(self, prefix: Path) -> Collection[str]:
        """Return the pods of one domain, in the order in which they came."""
        return self._pods.get(prefix, {}).keys()


class SparePool:
    """Spare pods of one assignment, found by nearness: the lowest common ancestor first, then the order of the tree.

    Building costs O(spares x layers), taking O(layers) amortised.
    """

    def __init__(self, topology: Topology, spares: Iterable[str]) -> None:
        self._topology = topology
        self._free: dict[str, None] = dict.fromkeys(topology.ordered(spares))
        self._by_prefix: dict[Path, list[str]] = {}
        # Reversed, so that the first of the order is popped from the end of a list.
        for uid in reversed(self._free):
            path = topology.path(uid)
            for depth in range(len(path) + 1):
                self._by_prefix.setdefault(path[:depth], []).append(uid)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._free))

    def __len__(self) -> int:
        return len(self._free)

    def take(self, pod_uid: str) -> None:
        """Take this pod. Raises KeyError when it is not free."""
        del self._free[pod_uid]

    def take_nearest(self, path: Path, is_fit: Callable[[str], bool]) -> str | None:
        """Take the nearest free pod that is fit; None when there is none."""
        for depth in range(len(path), -1, -1):
            uid = self._first_under(path[:depth], is_fit)
            if uid is not None:
                del self._free[uid]
                return uid
        return None

    def nearest_domain(self, prefix: Path, num_pods: int, is_fit: Callable[[Path, list[str]], bool]) -> list[str]:
        """Return the first `num_pods` free pods of the nearest other domain of the same layer that has so many.

        Empty when there is none. Nothing is taken.
        """
        depth = len(prefix)
        domains: dict[Path, list[str]] = {}
        for uid in self._free:
            domains.setdefault(self._topology.path(uid)[:depth], []).append(uid)
        best: list[str] = []
        best_common = -1
        for domain, pods in domains.items():
            if domain == prefix or len(pods) < num_pods:
                continue
            common = _common_depth(domain, prefix)
            if common > best_common and is_fit(domain, pods[:num_pods]):
                best, best_common = pods[:num_pods], common
        return best

    def _first_under(self, prefix: Path, is_fit: Callable[[str], bool]) -> str | None:
        pods = self._by_prefix.get(prefix, [])
        while pods and pods[-1] not in self._free:
            pods.pop()
        return next((uid for uid in reversed(pods) if uid in self._free and is_fit(uid)), None)


def _common_depth(one: Path, other: Path) -> int:
    depth = 0
    while depth < min(len(one), len(other)) and one[depth] == other[depth]:
        depth += 1
    return depth
