"""etcd was restored from a backup: the API server's versions are lower, and what had been deleted is there again."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.unbroken_operator.decisions.test_operator_ends import ENDED
from tests.unit.unbroken_operator.decisions.test_operator_ends import a_pod as an_ended_pod
from tests.unit.unbroken_operator.decisions.test_operator_memory import a_pod
from tests.unit.unbroken_operator.operator_world import running_world

from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.adapters.informer import Informer
from unbroken_operator.adapters.kube import WatchEvent
from unbroken_operator.adapters.stores import PodStore, ServiceStore
from unbroken_operator.api import layout
from unbroken_operator.decisions.memory import JobMemory
from unbroken_operator.decisions.snapshot import MAX_AHEAD

KEY = ("ml", "digits")
Item = dict[str, Any]


def a_service(version: int, uid: str = "s", **spec: Any) -> Item:
    """Return the job's Service."""
    labels = {"unbroken.dev/job": "digits"}
    metadata = {"name": "digits-rendezvous", "namespace": "ml", "uid": uid, "labels": labels}
    return {"metadata": {**metadata, "resourceVersion": str(version)}, "spec": spec}


def listed(store: Any, items: list[Item], version: int, namespace: str | None = None) -> None:
    """Ask for a list now, and take it."""
    store.replace([store.read(item) for item in items], str(version), store.mark(), namespace)


def names(store: PodStore) -> list[tuple[str, str, str]]:
    """Return name, uid and phase of the job's pods."""
    return [(pod.name, pod.uid, pod.phase) for pod in store.of_job(KEY)]


@pytest.mark.parametrize("version", [60, 5000], ids=["at a lower version", "at a version that was raised"])
def test_a_list_knows_better_than_all_that_was_known_before_it_was_asked_for(version: int) -> None:
    changed: list[Any] = []
    store = PodStore(changed.append)
    store.upsert(a_pod("digits-0", version=50, uid="a", phase="Pending"))
    store.upsert(a_pod("digits-0", version=90, uid="a", phase="Running"))
    store.upsert(a_pod("digits-1", version=91, uid="b"))
    store.upsert(a_pod("digits-2", version=55, uid="c"))
    store.remove(a_pod("digits-2", version=92, uid="c"))
    store.upsert(a_pod("digits-3", version=56, uid="d"))
    store.forget(KEY, "digits-3", "d")
    changed.clear()
    backup = [
        a_pod("digits-0", version=50, uid="a", phase="Pending"),
        a_pod("digits-2", version=55, uid="c"),
        a_pod("digits-3", version=56, uid="d"),
    ]
    listed(store, backup, version)
    assert names(store) == [("digits-0", "a", "Pending"), ("digits-2", "c", "Running"), ("digits-3", "d", "Running")]
    assert set(changed) == {KEY}
    store.upsert(a_pod("digits-0", version=version + 1, uid="a", phase="Failed"))
    store.remove(a_pod("digits-2", version=version + 2, uid="c"))
    assert names(store) == [("digits-0", "a", "Failed"), ("digits-3", "d", "Running")], "the watch goes on from there"


def test_a_pod_that_is_back_counts_no_more_as_one_that_ended() -> None:
    store = PodStore(lambda _: None)
    ended = an_ended_pod("a", "Running", ENDED)
    store.upsert(ended)
    store.remove(ended)
    assert store.num_ended(("ml", "digits"), "uid-of-digits") == 1
    listed(store, [ended], 60)
    assert store.num_ended(("ml", "digits"), "uid-of-digits") == 0


def test_no_ordinal_of_pods_that_a_backup_lacks_is_used_again() -> None:
    """Their processes may still run: a rendezvous must not take them for ended, nor new pods bear their names."""
    world = running_world()
    memory = JobMemory()
    memory.note_ordinals(world.job["status"])
    memory.note_ordinals({**world.job["status"], "nextPodOrdinal": 5})
    memory.note_ordinals(world.job["status"])
    floor = memory.view(0.0).next_pod_ordinal
    assert floor == 5
    world.memory = dataclasses.replace(world.memory, next_pod_ordinal=floor)
    world.remove_pod("digits-2")
    world.settle()
    assert world.names() == ["digits-0", "digits-1", "digits-5"]
    assert not world.pushed[-1][2].is_accounted


def test_what_is_written_while_a_list_is_on_its_way_is_kept() -> None:
    store = PodStore(lambda _: None)
    store.upsert(a_pod("digits-0", version=5, uid="a"))
    mark = store.mark()
    store.upsert(a_pod("digits-1", version=12, uid="created meanwhile"))
    store.upsert(a_pod("digits-0", version=13, uid="a", phase="Failed"))
    store.upsert(a_pod("digits-2", version=6, uid="b"))
    store.forget(KEY, "digits-2", "b")
    items = [a_pod("digits-0", version=5, uid="a"), a_pod("digits-2", version=6, uid="b")]
    store.replace([store.read(item) for item in items], "10", mark, None)
    assert names(store) == [("digits-0", "a", "Failed"), ("digits-1", "created meanwhile", "Running")]


def test_an_answer_that_comes_after_the_end_of_what_was_made_makes_it_no_second_time() -> None:
    """The operator believed for ever that the rendezvous had a Service, which somebody had deleted at once."""
    store, services = PodStore(lambda _: None), ServiceStore(lambda _: None)
    services.upsert(a_service(8))
    services.remove(a_service(9))
    services.upsert(a_service(8))
    assert services.of_job(KEY) is None
    services.upsert(a_service(10, uid="the next one"))
    assert services.of_job(KEY) is not None
    store.upsert(a_pod("digits-0", version=8, uid="a"))
    store.remove(a_pod("digits-0", version=9, uid="a"))
    store.upsert(a_pod("digits-0", version=8, uid="a"))
    assert names(store) == []


@pytest.mark.parametrize("namespace", ["ml", None])
def test_an_answer_that_comes_after_a_list_without_what_was_made_makes_it_no_second_time(namespace: str | None) -> None:
    """The watch was broken when it was made and deleted."""
    store, services = PodStore(lambda _: None), ServiceStore(lambda _: None)
    listed(services, [], 10, namespace)
    listed(store, [], 10, namespace)
    services.upsert(a_service(8))
    store.upsert(a_pod("digits-0", version=8, uid="a"))
    assert services.of_job(KEY) is None
    assert names(store) == []
    services.upsert(a_service(11))
    store.upsert(a_pod("digits-0", version=11, uid="b"))
    assert services.of_job(KEY) is not None
    assert names(store) == [("digits-0", "b", "Running")]
    # The history was replaced: versions are lower now.
    listed(services, [], 3, namespace)
    services.upsert(a_service(4))
    assert services.of_job(KEY) is not None


def test_a_list_of_one_namespace_says_nothing_of_others() -> None:
    """An operator of several namespaces took the pods of all but the last one for gone at its start."""
    store, services = PodStore(lambda _: None), ServiceStore(lambda _: None)
    other = a_pod("digits-0", version=7, uid="other")
    other["metadata"]["namespace"] = "other"
    listed(store, [a_pod("digits-0", version=5, uid="a")], 10, "ml")
    listed(store, [other], 11, "other")
    assert names(store) == [("digits-0", "a", "Running")]
    assert [pod.uid for pod in store.of_job(("other", "digits"))] == ["other"]
    listed(services, [a_service(5)], 10, "ml")
    listed(services, [], 11, "other")
    assert services.of_job(KEY) is not None
    listed(services, [], 12, "ml")
    assert services.of_job(KEY) is None


@pytest.mark.parametrize("version", [60, 5000])
def test_a_service_is_as_the_list_has_it(version: int) -> None:
    store = ServiceStore(lambda _: None)
    store.upsert(a_service(90, selector={"a": "new"}))
    listed(store, [a_service(50, selector={"a": "old"})], version)
    found = store.of_job(KEY)
    assert found is not None
    assert found.spec["selector"] == {"a": "old"}
    listed(store, [], version + 1)
    assert store.of_job(KEY) is None


class Histories:
    """An API server with a history of its own after each list, and a watch that says what the test wants."""

    def __init__(self, lists: list[int], watches: list[list[int]]) -> None:
        self.lists, self.watches = lists, watches
        self.last = 0

    async def list(self, _path: str, _selector: str = "", *, read: object) -> tuple[list[Item], str]:
        if not self.lists:
            await asyncio.Event().wait()
        return [], str(self.lists.pop(0))

    async def peek(self, _path: str) -> str:
        return str(min([self.last, *self.lists]))

    async def watch(self, _path: str, _version: str, _selector: str = "") -> AsyncIterator[WatchEvent]:
        if not self.watches:
            await asyncio.Event().wait()
        for version in self.watches.pop(0):
            self.last = version
            yield WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


@pytest.mark.parametrize(
    ("lists", "watches", "num_restored"),
    [
        pytest.param([100, 200], [[101, 150, 90]], 1, id="a watch went back, and the new history is long"),
        pytest.param([100, 60], [[101, 150, 90]], 1, id="a watch goes on in another history"),
        pytest.param([100, 60], [[110]], 1, id="a watch that is begun again would wait for the former history"),
        pytest.param([100], [[110], [115, 120]], 0, id="all as usual"),
        pytest.param([100, 60], [[150, 90], [65]], 1, id="twice is told once"),
    ],
)
def test_an_informer_notices_that_the_history_was_replaced(
    lists: list[int], watches: list[list[int]], num_restored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = asyncio.sleep

    async def no_time(_delay_s: float) -> None:
        await pause(0)

    async def scenario() -> None:
        told: list[None] = []
        source = Histories(lists, watches)
        informer = Informer(source, "/api/v1/pods", PodStore(lambda _: None), on_restored=lambda: told.append(None))
        running = asyncio.create_task(informer.run())
        async with asyncio.timeout(60):
            while source.lists or source.watches:
                await pause(0)
            for _ in range(20):
                await pause(0)
        assert not running.done()
        running.cancel()
        assert len(told) == num_restored

    monkeypatch.setattr(asyncio, "sleep", no_time)
    asyncio.run(scenario())


def test_an_operator_that_starts_during_a_restore_learns_from_the_report_which_ordinals_were_used() -> None:
    """Before, it made a pod of the name of one that may still train, and told the rendezvous that all are known."""
    world = running_world()
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"])
    assert world.report is not None
    late = dataclasses.replace(world.report.pods[1], pod="digits-4", uid="late")
    world.report = dataclasses.replace(world.report, pods=(world.report.pods[0], late), revision=9)
    world.job["status"]["nextPodOrdinal"] = 3
    world.remove_pod("digits-1")
    world.settle()
    assert world.created[-1] == "digits-5"
    assert world.job["status"]["nextPodOrdinal"] == 6
    assert not world.pushed[-1][2].is_accounted


def test_a_report_that_names_pods_of_the_far_future_or_of_other_jobs_moves_no_ordinal() -> None:
    world = running_world()
    assert world.report is not None
    before = world.snapshot().next_pod_ordinal
    for name in (
        f"digits-{before + MAX_AHEAD}",
        "digits-99999999999999999999",
        "other-50",
        "digits-rendezvous-50",
        "digits-x",
        "digits-",
    ):
        pods = (dataclasses.replace(world.report.pods[0], pod=name),)
        world.report = dataclasses.replace(world.report, pods=pods)
        assert world.snapshot().next_pod_ordinal == before


@pytest.mark.parametrize("name", ["x-9", f"x-{'9' * 240}", "digits-2147483646", f"digits-{'9' * 60}"])
def test_a_pod_that_somebody_else_made_burns_no_ordinals(name: str) -> None:
    """It needs only the labels of a training pod. Before, one of 2 s made the job's next pod the 2^53th for good."""
    world = running_world()
    before = world.snapshot().next_pod_ordinal
    stranger = dataclasses.replace(
        world.snapshot().pods[0], name=name, uid="s", owner_uid="", ordinal=layout.pod_ordinal(name)
    )
    snapshot = dataclasses.replace(world.snapshot(), pods=(*world.snapshot().pods, stranger))
    assert stranger.component == layout.TRAINER
    assert snapshot.next_pod_ordinal == before
