"""What the operator knows of pods, services and nodes: views from the watches and from the operator's own writes.

Own writes count at once: a plan that ran before the watch reported a new pod would create it twice.

What was known before a list was asked for, the list knows better, whatever the versions: etcd may have been restored
from a backup, with lower versions, or with objects that had been deleted. What became known since then is compared with
it by version.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from unbroken_operator.api import layout
from unbroken_operator.decisions.snapshot import NodeView, PodView, ServiceView, node_view, pod_view, service_view

JobKey = tuple[str, str]
"""Namespace and name."""
_Owner = tuple[str, str]
"""Namespace and uid of a job: a pod elsewhere may bear the uid, too."""

MAX_TOMBSTONES = 20_000
MAX_PAST_HOSTS = 128
"""Of one job: more than a job may blame, so that moving about hides none of them."""
MAX_HOSTED_JOBS = 2_000
MAX_GONE_NODES = 20_000
MAX_GONE_SERVICES = 2_000
MAX_VANISHED = 256
"""Of one job, until its worker has looked what became of them."""


View = TypeVar("View")


@dataclass(frozen=True)
class Known(Generic[View]):
    """An object, and when it became known."""

    version: int
    view: View
    mark: int
    """Of the last list that had been asked for by then."""


@dataclass(frozen=True)
class Seen(Generic[View]):
    """What is kept of an object of the API server."""

    key: JobKey
    version: int
    view: View


def version_of(item: Mapping[str, Any]) -> int:
    """Return an object's resource version as a number; newer ones are higher."""
    text = str(item["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


class _Lists:
    """The last lists. An answer to who made an object may come after a list that no longer had it."""

    def __init__(self) -> None:
        self._versions: dict[str | None, int] = {}
        """By namespace; None: of all."""

    def note(self, namespace: str | None, version: str) -> int:
        """Note a list, and return its version as a number."""
        self._versions[namespace] = int(version) if version.isdecimal() else 0
        return self._versions[namespace]

    def knew_better(self, item: Seen[Any]) -> bool:
        """Whether an object that is not held had gone before the last list: else that would have had it."""
        return 0 < item.version <= max(self._versions.get(None, 0), self._versions.get(item.key[0], 0))


@dataclass(frozen=True)
class HeldPods:
    """One job's pods at one moment. To make it costs next to nothing, to read it a millisecond for a thousand pods."""

    owner_uid: str
    known: tuple[Known[PodView], ...]
    past_hosts: tuple[str, ...]
    """Nodes on which pods of the job ran, that may have gone."""

    def by_name(self) -> tuple[PodView, ...]:
        """Return the pods, sorted by name."""
        return tuple(sorted((known.view for known in self.known), key=attrgetter("name")))

    def hosts(self) -> frozenset[str]:
        """See PodStore."""
        views = (known.view for known in self.known)
        present = (view.node for view in views if view.owner_uid == self.owner_uid and view.has_run)
        return frozenset((*self.past_hosts, *present))


class PodStore:
    """Pods of all jobs. `on_change` gets the job whose pods changed, `on_cut` a pod of which a part is not kept."""

    def __init__(
        self, on_change: Callable[[JobKey], None], on_cut: Callable[[JobKey, PodView], None] = lambda _key, _pod: None
    ) -> None:
        self._on_change = on_change
        self._on_cut = on_cut
        self._pods: dict[JobKey, dict[str, Known[PodView]]] = {}
        self._mark = 0
        self._lists = _Lists()
        self._gone: OrderedDict[str, tuple[int | None, int]] = OrderedDict()
        """By uid, versions at which pods left the watch, None where the pod itself is known to be gone; and marks."""
        self._vanished: OrderedDict[JobKey, OrderedDict[str, PodView]] = OrderedDict()
        """By name: pods that left the watch without being deleted. They may only have lost the job's label."""
        self._ended: OrderedDict[str, _Owner] = OrderedDict()
        """Owners of deleted training pods that were seen to end, by uid of the pod."""
        self._num_ended: Counter[_Owner] = Counter()
        self._hosts: OrderedDict[_Owner, OrderedDict[str, None]] = OrderedDict()
        """By job: nodes on which its pods ran, the last one last."""
        self.tainted: Mapping[str, str] = {}
        """Tainted devices of pods, for people, by uid of the pod; replaced as a whole."""

    def hosts(self, key: JobKey, owner_uid: str) -> frozenset[str]:
        """Return the nodes on which pods of this very job were seen to run, lately or now."""
        return self.held(key, owner_uid).hosts()

    def held(self, key: JobKey, owner_uid: str) -> "HeldPods":
        """Return what is known of a job's pods at this moment; a thread may look at it."""
        return HeldPods(
            owner_uid, tuple(self._pods.get(key, {}).values()), tuple(self._hosts.get((key[0], owner_uid), ()))
        )

    def num_of_job(self, key: JobKey) -> int:
        """Return how many pods bear the job's label."""
        return len(self._pods.get(key, ()))

    def num_ended(self, key: JobKey, owner_uid: str) -> int:
        """Return how many deleted training pods of a job were seen to end."""
        return self._num_ended[key[0], owner_uid]

    def of_job(self, key: JobKey) -> tuple[PodView, ...]:
        """Return the pods that bear the job's label, by name."""
        return self.held(key, "").by_name()

    def vanished(self, key: JobKey) -> tuple[PodView, ...]:
        """Return the pods that left the watch without being deleted first."""
        return tuple(self._vanished.get(key, {}).values())

    def explain(self, key: JobKey, name: str) -> None:
        """Forget that a pod vanished: it is known what became of it."""
        pods = self._vanished.get(key)
        if pods is not None:
            pods.pop(name, None)
            if not pods:
                del self._vanished[key]

    def drop(self, key: JobKey) -> None:
        """Forget what is kept for the worker of a job that is gone."""
        self._vanished.pop(key, None)

    def jobs_on(self, node: str) -> list[JobKey]:
        """Return the jobs that have a pod on this node."""
        return [key for key, pods in self._pods.items() if any(known.view.node == node for known in pods.values())]

    def claimants(self, key: JobKey, owner_uid: str) -> Iterator[PodView]:
        """Yield a job's training pods that run, have claims of their own, and are not told to leave yet."""
        for known in self._pods.get(key, {}).values():
            pod = known.view
            is_there = pod.node and not pod.is_deleting and not pod.is_terminal and not pod.leaving
            if pod.claims and is_there and pod.owner_uid == owner_uid and pod.component == layout.TRAINER:
                yield pod

    def note_tainted(self, found: Mapping[str, str]) -> None:
        """Take what was found of the devices of all pods."""
        changed = {uid for uid in {*found, *self.tainted} if found.get(uid) != self.tainted.get(uid)}
        self.tainted = found
        for key, pods in list(self._pods.items()) if changed else ():
            if any(known.view.uid in changed for known in pods.values()):
                self._on_change(key)

    def mark(self) -> int:
        """See Store."""
        self._mark += 1
        return self._mark

    def replace(self, items: list[Seen[PodView]], version: str, mark: int = 0, namespace: str | None = None) -> None:
        """See Store."""
        listed = {item.view.uid for item in items}
        list_version = self._lists.note(namespace, version)
        for key, pods in list(self._pods.items()):
            if namespace is not None and key[0] != namespace:
                continue
            for name, known in list(pods.items()):
                if known.view.uid not in listed and (known.mark < mark or known.version <= list_version):
                    self._forget(key, name, known.view.uid, list_version)
        for item in items:
            self._take(item, mark)

    def upsert(self, item: dict[str, Any]) -> None:
        """See Store."""
        seen = self.read(item)
        if seen.view.name in self._pods.get(seen.key, {}) or not self._lists.knew_better(seen):
            self._take(seen, 0)

    def read(self, item: dict[str, Any]) -> Seen[PodView]:
        """See Store."""
        return Seen(_job_key(item), version_of(item), pod_view(item))

    def _take(self, item: Seen[PodView], mark: int) -> None:
        """Hold a pod, unless a newer state of it became known since `mark`."""
        key, version, view = item.key, item.version, item.view
        before = self._pods.get(key, {}).get(view.name)
        if before is not None and before.mark >= mark and before.version >= version:
            return
        if not self._is_back(view.uid, version, mark):
            return
        self._pods.setdefault(key, {})[view.name] = Known(version, view, self._mark)
        if view.cut and (before is None or before.view.cut != view.cut):
            self._on_cut(key, view)
        self._note_host(key, view)
        if before is None or before.view != view:
            self._on_change(key)

    def remove(self, item: dict[str, Any]) -> None:
        """See Store."""
        key, view = _job_key(item), pod_view(item)
        self._note_end(key, view)
        if not view.is_deleting and view.component == layout.TRAINER:
            self._note_vanished(key, view)
        self._forget(key, view.name, view.uid, version_of(item))

    def forget(self, key: JobKey, name: str, uid: str) -> None:
        """Drop a pod that a call showed to be gone."""
        self._forget(key, name, uid, None)

    def _is_back(self, uid: str, version: int, mark: int) -> bool:
        """Whether a pod is there; one that left the watch may bear the job's label again, or have been restored."""
        if uid not in self._gone:
            return True
        left_at, left_mark = self._gone[uid]
        if left_mark >= mark and (left_at is None or version <= left_at):
            return False
        del self._gone[uid]
        owner = self._ended.pop(uid, None)
        if owner is not None:
            # It is among the present ones again.
            self._count_back(owner)
        return True

    def _forget(self, key: JobKey, name: str, uid: str, version: int | None) -> None:
        self._gone[uid] = (version, self._mark)
        if len(self._gone) > MAX_TOMBSTONES:
            self._gone.popitem(last=False)
        pods = self._pods.get(key, {})
        if name in pods and pods[name].view.uid == uid:
            self._note_end(key, pods[name].view)
            del pods[name]
            if not pods:
                self._pods.pop(key, None)
            self._on_change(key)

    def _note_host(self, key: JobKey, view: PodView) -> None:
        if not view.has_run or not view.owner_uid:
            return
        owner = (key[0], view.owner_uid)
        nodes = self._hosts.setdefault(owner, OrderedDict())
        nodes[view.node] = None
        nodes.move_to_end(view.node)
        self._hosts.move_to_end(owner)
        if len(nodes) > MAX_PAST_HOSTS:
            nodes.popitem(last=False)
        if len(self._hosts) > MAX_HOSTED_JOBS:
            self._hosts.popitem(last=False)

    def _note_end(self, key: JobKey, view: PodView) -> None:
        if view.component != layout.TRAINER or not view.has_ended or view.uid in self._ended:
            return
        self._ended[view.uid] = (key[0], view.owner_uid)
        self._num_ended[key[0], view.owner_uid] += 1
        if len(self._ended) > MAX_TOMBSTONES:
            _, owner = self._ended.popitem(last=False)
            self._count_back(owner)

    def _count_back(self, owner: _Owner) -> None:
        self._num_ended[owner] -= 1
        if self._num_ended[owner] <= 0:
            del self._num_ended[owner]

    def _note_vanished(self, key: JobKey, view: PodView) -> None:
        """Remember a pod for its job's worker: there may be none, since labels are anybody's to write."""
        pods = self._vanished.setdefault(key, OrderedDict())
        pods[view.name] = view
        self._vanished.move_to_end(key)
        if len(pods) > MAX_VANISHED:
            pods.popitem(last=False)
        if len(self._vanished) > MAX_HOSTED_JOBS:
            self._vanished.popitem(last=False)


class ServiceStore:
    """Services of all jobs."""

    def __init__(self, on_change: Callable[[JobKey], None]) -> None:
        self._on_change = on_change
        self._services: dict[JobKey, Known[ServiceView]] = {}
        self._mark = 0
        self._lists = _Lists()
        self._gone: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By uid, versions at which Services were deleted, and marks."""

    def of_job(self, key: JobKey) -> ServiceView | None:
        """Return the Service that bears the job's label and name."""
        found = self._services.get(key)
        return None if found is None else found.view

    def mark(self) -> int:
        """See Store."""
        self._mark += 1
        return self._mark

    def replace(
        self, items: list[Seen[ServiceView]], version: str, mark: int = 0, namespace: str | None = None
    ) -> None:
        """See Store."""
        listed = {item.view.uid for item in items}
        list_version = self._lists.note(namespace, version)
        for key, known in list(self._services.items()):
            is_known_better = known.mark < mark or known.version <= list_version
            if namespace in (None, key[0]) and known.view.uid not in listed and is_known_better:
                del self._services[key]
                self._on_change(key)
        for item in items:
            self._take(item, mark)

    def upsert(self, item: dict[str, Any]) -> None:
        """See Store."""
        seen = self.read(item)
        if seen.key in self._services or not self._lists.knew_better(seen):
            self._take(seen, 0)

    def read(self, item: dict[str, Any]) -> Seen[ServiceView]:
        """See Store."""
        return Seen(_job_key(item), version_of(item), service_view(item))

    def _take(self, item: Seen[ServiceView], mark: int) -> None:
        """Hold a Service, unless a newer state of it became known since `mark`."""
        key = item.key
        if item.view.name != layout.rendezvous_name(key[1]):
            return
        left_at, left_mark = self._gone.get(item.view.uid, (-1, -1))
        if left_mark >= mark and item.version <= left_at:
            return  # An answer to who made it, later than the news that it is deleted.
        before = self._services.get(key)
        if before is None or before.mark < mark or before.version < item.version:
            self._services[key] = Known(item.version, item.view, self._mark)
            self._on_change(key)

    def remove(self, item: dict[str, Any]) -> None:
        """See Store."""
        key, uid = _job_key(item), item["metadata"]["uid"]
        self._gone[uid] = (version_of(item), self._mark)
        if len(self._gone) > MAX_GONE_SERVICES:
            self._gone.popitem(last=False)
        found = self._services.get(key)
        if found is not None and found.view.uid == uid:
            del self._services[key]
            self._on_change(key)


class NodeStore:
    """All nodes. `on_change` gets the name of a node that changed."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._nodes: dict[str, NodeView] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Names of nodes that were there and went."""

    def unseen(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of these nodes that never were there: they have gone before, or the watch is behind.

        A thread may ask: each name is looked up by itself.
        """
        return frozenset(name for name in names if name not in self._nodes and name not in self._gone)

    @property
    def nodes(self) -> Mapping[str, NodeView]:
        """Nodes by name."""
        return self._nodes

    def mark(self) -> int:
        """See Store."""
        return 0

    def replace(self, items: list[NodeView], version: str, mark: int = 0, namespace: str | None = None) -> None:
        """See Store."""
        names = {view.name for view in items}
        for name in [name for name in self._nodes if name not in names]:
            self._drop(name)
        for view in items:
            self._take(view)

    def read(self, item: dict[str, Any]) -> NodeView:
        """See Store."""
        return node_view(item)

    def upsert(self, item: dict[str, Any]) -> None:
        """See Store."""
        self._take(node_view(item))

    def _take(self, view: NodeView) -> None:
        self._gone.pop(view.name, None)
        if self._nodes.get(view.name) != view:
            self._nodes[view.name] = view
            self._on_change(view.name)

    def remove(self, item: dict[str, Any]) -> None:
        """See Store."""
        if item["metadata"]["name"] in self._nodes:
            self._drop(item["metadata"]["name"])

    def _drop(self, name: str) -> None:
        del self._nodes[name]
        self._gone[name] = None
        if len(self._gone) > MAX_GONE_NODES:
            self._gone.popitem(last=False)
        self._on_change(name)


def _job_key(item: Mapping[str, Any]) -> JobKey:
    labels = item["metadata"].get("labels") or {}
    return item["metadata"]["namespace"], labels.get(layout.JOB_LABEL, "")
