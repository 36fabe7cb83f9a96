"""Whoever may create pods can write anything into them: what the operator keeps of it is bounded, and told once."""

import asyncio
import logging
import sys
from typing import Any, cast

import pytest
from tests.unit.unbroken_operator.operator_world import a_node, running_world

from unbroken_operator.adapters import stores
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.rendezvous_client import RendezvousApi
from unbroken_operator.adapters.stores import MAX_VANISHED, PodStore
from unbroken_operator.api import layout
from unbroken_operator.api.status_models import MAX_SUSPECTS
from unbroken_operator.decisions.snapshot import OperatorOptions, pod_view, service_view
from unbroken_operator.jobs import Jobs

LONG = "u" * 255_000
KEY = ("evil", "nojob")


def forged(number: int = 0, job: str = "nojob", *, is_deleted: bool = True, **annotations: str) -> dict[str, Any]:
    """Return a pod that looks like one of a job's."""
    gone = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if is_deleted else {}
    return {
        "metadata": {
            "name": f"p{number}",
            "namespace": "evil",
            "uid": f"real-{number}",
            "resourceVersion": str(number + 1),
            "labels": {layout.JOB_LABEL: job, layout.COMPONENT_LABEL: layout.TRAINER},
            "annotations": {f"unbroken.dev/{key.replace('_', '-')}": value for key, value in annotations.items()},
            **gone,
        },
        "spec": {},
        "status": {},
    }


def size(item: Any) -> int:
    """Return the bytes of an object and of all that it holds."""
    inner: list[Any] = []
    if isinstance(item, dict):
        inner = [*item, *item.values()]
    elif isinstance(item, list | tuple | set | frozenset):
        inner = list(item)
    elif hasattr(item, "__dict__"):
        inner = list(vars(item).values())
    return sys.getsizeof(item) + sum(map(size, inner))


@pytest.mark.parametrize(
    "key", ["avoids", "job_uid", "leaving", "topology", "settings", "made_from", "template", "standby"]
)
def test_an_annotation_of_ours_is_kept_no_longer_than_we_write_it(key: str) -> None:
    long = ",".join(f"{number:x}" for number in range(42_000))[:255_000] if key == "avoids" else LONG
    item = forged()
    item["metadata"]["annotations"][f"unbroken.dev/{key.replace('_', '-')}"] = long
    assert size(pod_view(item)) < 20_000


def test_labels_annotations_owners_and_finalizers_of_others_are_bounded() -> None:
    many = {f"example.com/{number}": "x" * 60 for number in range(9000)}
    item = forged()
    item["metadata"] |= {
        "labels": item["metadata"]["labels"] | many,
        "annotations": many,
        "ownerReferences": [{"controller": True, "uid": LONG}],
        "finalizers": [f"example.com/{number}" for number in range(9000)],
    }
    view = pod_view(item)
    assert size(view) < 60_000
    assert view.owner_uid == ""
    service = {**forged(), "spec": {"selector": many, "ports": [{"port": 1}] * 9000}}
    assert size(service_view(service)) < 30_000


def test_a_pod_of_the_operators_own_is_kept_as_it_is() -> None:
    """With as many suspects as a status has, each with the longest name of a node."""
    world = running_world()
    world.nodes["a"] = a_node("a")
    names = [f"{number:02d}-{'n' * 250}" for number in range(MAX_SUSPECTS)]
    world.nodes |= {name: a_node(name) for name in names}
    world.job["status"]["suspectNodes"] = [
        {"name": name, "score": 9.0, "faults": 9, "scoreTime": world.now} for name in names
    ]
    world.remove_pod("digits-0")
    world.settle()
    views = {name: pod_view(item) for name, item in world.pods.items()}
    assert set(views[world.created[-1]].avoids) == set(names)
    assert {(view.cut, view.owner_uid) for view in views.values()} == {("", world.job["metadata"]["uid"])}


def test_owners_of_forged_pods_that_ended_are_forgotten_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, their uids of any length were counted for ever: 400 pods took 100 MB."""
    monkeypatch.setattr(stores, "MAX_TOMBSTONES", 400)
    store = PodStore(lambda _: None)
    for number in range(1000):
        item = forged(number, job=f"nojob{number}", job_uid=f"{number}" + ("u" * 255_000 if number % 100 == 0 else ""))
        store.upsert(item)
        store.remove(item)
    assert len(store._num_ended) <= len(store._ended) <= 400
    assert max(len(owner) for _, owner in store._num_ended) <= 128
    assert (len(store._pods), len(store._vanished)) == (0, 0)


def test_a_pod_that_ended_and_came_back_counts_for_nobody() -> None:
    store = PodStore(lambda _: None)
    item = forged(job_uid="u1")
    store.upsert(item)
    store.remove(item)
    assert store.num_ended(KEY, "u1") == 1
    store.upsert({**item, "metadata": item["metadata"] | {"resourceVersion": "9"}})
    assert (store.num_ended(KEY, "u1"), len(store._num_ended)) == (0, 0)


def test_pods_that_lost_their_label_are_remembered_in_bounds() -> None:
    """No worker asks for those of a job that does not exist."""
    store = PodStore(lambda _: None)
    for number in range(3 * MAX_VANISHED):
        store.remove(forged(number, is_deleted=False))
    assert len(store.vanished(KEY)) == MAX_VANISHED
    for number in range(4000):
        store.remove(forged(number, job=f"nojob{number}", is_deleted=False))
    assert len(store._vanished) <= 2000


def test_what_is_left_out_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = OperatorMetrics()

    async def scenario() -> None:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), metrics, ())
        for number in range(5):
            for _ in range(3):
                jobs._shared.pods.upsert(forged(number, avoids=LONG))
        await jobs.stop()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert metrics.registry.get_sample_value("unbroken_operator_refusals_total", {"what": "pod"}) == 5
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == (
        "pod is not held as it is pod=evil/p0 "
        "because=metadata.annotations[unbroken.dev/avoids]: want at most 5080 characters, got 255000"
    )
