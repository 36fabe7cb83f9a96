"""When the API server is asked again after it did not do what it was asked."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from unbroken_operator.adapters.backoff import MAX_ABSENCE_S, MAX_BESIDE_S, MAX_S, after_failure_s
from unbroken_operator.adapters.errors import (
    KubeConflict,
    KubeError,
    KubeGone,
    KubeNotFound,
    KubeRefused,
    KubeUnavailable,
)
from unbroken_operator.adapters.executor import NUM_PARALLEL, Executor, Services
from unbroken_operator.adapters.informer import Informer
from unbroken_operator.adapters.job_secret import JobSecret
from unbroken_operator.adapters.kube import WatchEvent
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.poller import Poller
from unbroken_operator.adapters.stores import NodeStore, PodStore, ServiceStore
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import Action, CreatePod, DeletePod, WriteStatus
from unbroken_operator.decisions.memory import JobMemory
from unbroken_operator.decisions.snapshot import OperatorOptions


@pytest.mark.parametrize(
    ("error", "first_s", "tenth_s"),
    [
        pytest.param(KubeUnavailable("503"), 0.4, MAX_ABSENCE_S, id="absent: seldom, but not for long"),
        pytest.param(KubeUnavailable("429", 0.0), 0.4, MAX_BESIDE_S, id="the server wants no delay: a small one"),
        pytest.param(KubeUnavailable("429", 20.0), 20.0, 20.0, id="the server wants 20 s"),
        pytest.param(KubeConflict("409"), 0.4, MAX_S, id="any other"),
    ],
)
def test_a_failed_plan_is_tried_again_when_the_server_wants_and_ever_more_slowly(
    error: KubeError, first_s: float, tenth_s: float
) -> None:
    latest = 1.5 if isinstance(error, KubeUnavailable) and error.retry_after_s else 1.0
    assert after_failure_s(error, 1, 1.0) == pytest.approx(first_s * latest)
    assert after_failure_s(error, 10, 1.0) == pytest.approx(tenth_s * latest)
    asked_s = (error.retry_after_s or 0.0) if isinstance(error, KubeUnavailable) else 0.0
    for number in (1, 10, 10_000):
        delays = [after_failure_s(error, number, spread) for spread in (0.0, 0.5, 1.0)]
        assert delays == sorted(set(delays)), "those who failed together come back together"
        assert delays[0] >= asked_s


class Odd:
    """An API server whose watches all end at once, or fail, as the test says; it counts what it is asked."""

    def __init__(self, end: KubeError | None) -> None:
        self._end = end
        self._events: list[WatchEvent] = []
        self.num_lists = 0
        self.num_watches = 0

    async def list(self, _path: str, _selector: str = "", *, read: object) -> tuple[list[dict[str, Any]], str]:
        self.num_lists += 1
        return [], "1"

    async def peek(self, _path: str) -> str:
        return "1"

    async def watch(self, _path: str, _version: str, _selector: str = "") -> AsyncIterator[WatchEvent]:
        self.num_watches += 1
        if self._end is not None:
            raise self._end
        for event in self._events:
            yield event


class Nothing:
    """Holds nothing."""

    def read(self, item: dict[str, Any]) -> dict[str, Any]:
        """See Store."""
        return item

    def mark(self) -> int:
        """See Store."""
        return 0

    def replace(self, items: list[dict[str, Any]], version: str, _mark: int, _namespace: str | None) -> None:
        """See Store."""

    def upsert(self, item: dict[str, Any]) -> None:
        """See Store."""

    def remove(self, item: dict[str, Any]) -> None:
        """See Store."""


@pytest.mark.parametrize(
    ("end", "most_lists", "most_watches"),
    [
        pytest.param(None, 1, 90, id="watches that end at once"),
        pytest.param(KubeGone("410"), 75, 75, id="history is always gone"),
        pytest.param(KubeUnavailable("503"), 60, 240, id="watches that fail"),
        pytest.param(KubeUnavailable("429", 5.0), 30, 120, id="watches that the server wants later"),
    ],
)
def test_a_server_that_only_ends_watches_is_asked_ever_more_seldom(
    end: KubeError | None, most_lists: int, most_watches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes of it, in no time: a list of all pods is not made again at every turn."""
    pause, passed_s = asyncio.sleep, 0.0

    async def no_time(delay_s: float) -> None:
        nonlocal passed_s
        passed_s += delay_s
        await pause(0)

    async def scenario() -> None:
        source = Odd(end)
        running = asyncio.create_task(Informer(source, "/api/v1/pods", Nothing()).run())
        async with asyncio.timeout(60):
            while passed_s < 600:
                await pause(0)
                assert source.num_watches < 10_000, f"only {passed_s:.1f} s passed meanwhile"
        running.cancel()
        assert source.num_lists <= most_lists
        assert source.num_watches <= most_watches

    monkeypatch.setattr(asyncio, "sleep", no_time)
    asyncio.run(scenario())


class Server:
    """Creates pods slowly, a few at a time; fails from a number on."""

    def __init__(self, error: KubeError | None = None, fails_from: int = 10**6) -> None:
        self._error = error
        self._fails_from = fails_from
        self.created: list[str] = []
        self.deleted: list[str] = []
        self.sought: list[str] = []
        self.num_asked = 0
        self.num_now = 0
        self.most_at_once = 0

    async def create(self, _path: str, item: dict[str, Any]) -> dict[str, Any]:
        """See Kube."""
        number, self.num_asked = self.num_asked, self.num_asked + 1
        self.num_now += 1
        self.most_at_once = max(self.most_at_once, self.num_now)
        # The first takes longest: others must not wait for it.
        for _ in range(500 if number == 0 else 1):
            await asyncio.sleep(0)
        self.num_now -= 1
        if self._error is not None and number >= self._fails_from:
            raise self._error
        self.created.append(item["metadata"]["name"])
        return {**item, "metadata": {**item["metadata"], "uid": f"uid-{number}", "resourceVersion": str(number + 1)}}

    async def get(self, path: str) -> dict[str, Any]:
        """See Kube."""
        self.sought.append(path.rpartition("/")[2])
        raise KubeNotFound(path)

    async def delete(self, path: str, _uid: str, _is_forced: bool = False) -> dict[str, Any]:
        """See Kube."""
        self.deleted.append(path)
        return {}


def _executor(server: Any, memory: JobMemory | None = None) -> Executor:
    pods, services = PodStore(lambda _: None), ServiceStore(lambda _: None)
    client: Any = None  # nobody asks a rendezvous here
    shared = Services(
        server, client, pods, services, NodeStore(lambda _: None), OperatorOptions("sidecar:1"), OperatorMetrics()
    )
    secret = JobSecret(server, ("ml", "digits"), "uid-of-digits", encrypts=True)
    return Executor(shared, secret, Poller(client, lambda: None, "ml/digits"), memory or JobMemory())


def _pods(num: int) -> tuple[Action, ...]:
    return tuple(
        CreatePod({"metadata": {"name": f"digits-{index}", "namespace": "ml", "labels": _LABELS}})
        for index in range(num)
    )


_LABELS = {layout.JOB_LABEL: "digits", layout.COMPONENT_LABEL: layout.TRAINER}


def test_a_slow_pod_does_not_hold_up_the_others() -> None:
    server = Server()
    refusals = asyncio.run(_executor(server).apply((*_pods(200), DeletePod("old", "uid-of-old", "why"))))
    assert refusals == ()
    assert server.most_at_once == NUM_PARALLEL
    assert len(server.created) == 200
    assert server.created[-1] == "digits-0"
    assert len(server.deleted) == 1


class Strict(Server):
    """Refuses a status with one of these fields."""

    def __init__(self, *refused: str) -> None:
        super().__init__()
        self._refused = set(refused)
        self.status: dict[str, Any] = {}

    async def merge(self, path: str, patch: Any) -> dict[str, Any]:
        """See Kube."""
        wrong = self._refused & set(patch["status"])
        if wrong:
            raise KubeRefused(f"422 {path}: status.{wrong.pop()}: Invalid value")
        self.status |= patch["status"]
        return {"status": self.status}


def test_a_status_that_is_refused_holds_up_no_pod_once_its_ordinals_are_written() -> None:
    """And it is told, so that the next attempt comes later."""
    server = Strict("history")
    write = WriteStatus({"history": [{}], "nextPodOrdinal": 3})
    with pytest.raises(KubeRefused, match=r"422 .* status\.history"):
        asyncio.run(_executor(server).apply((write, *_pods(3), DeletePod("old", "uid-of-old", "why"))))
    assert server.status == {"nextPodOrdinal": 3}
    assert len(server.created) == 3
    assert len(server.deleted) == 1


def test_no_pod_is_created_while_its_ordinal_cannot_be_written() -> None:
    """Else it might be given to another one, and the first be taken for ended."""
    server = Strict("nextPodOrdinal")
    with pytest.raises(KubeRefused, match=r"422 .* status\.nextPodOrdinal"):
        asyncio.run(_executor(server).apply((WriteStatus({"nextPodOrdinal": 3}), *_pods(3))))
    assert server.created == []


class Versioned(Server):
    """Holds a job, and takes a patch for another version of it than the present one for a conflict."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 7
        self.status: dict[str, Any] = {"nextPodOrdinal": 4}
        self.patches: list[dict[str, Any]] = []

    async def merge(self, path: str, patch: Any) -> dict[str, Any]:
        """See Kube."""
        self.patches.append(patch)
        if patch["metadata"].get("resourceVersion", str(self.version)) != str(self.version):
            raise KubeConflict(f"409 {path}: has been modified")
        self.version += 1
        self.status |= patch["status"]
        return {"metadata": {"resourceVersion": str(self.version)}, "status": dict(self.status)}


def test_a_late_write_does_not_take_back_the_ordinals_that_were_reserved_since() -> None:
    """What a write asks for may take effect after it was given up for lost, and another one was made instead."""
    server = Versioned()
    late = WriteStatus({"nextPodOrdinal": 5}), WriteStatus({"state": "Forming"})
    asyncio.run(_executor(server).apply((WriteStatus({"nextPodOrdinal": 6}), *_pods(2)), "7"))
    with pytest.raises(KubeConflict):
        asyncio.run(_executor(server).apply((late[0], *_pods(1)), "7"))
    assert server.status == {"nextPodOrdinal": 6}
    assert len(server.created) == 2, "no pod is made whose ordinal is not reserved"
    # Whatever else a status says the next plan writes again, and other writers may change the job meanwhile.
    asyncio.run(_executor(server).apply((late[1],), "7"))
    assert "resourceVersion" not in server.patches[-1]["metadata"]


def test_a_plan_that_writes_two_statuses_knows_the_version_of_the_first() -> None:
    server = Versioned()
    writes = WriteStatus({"nextPodOrdinal": 5}), WriteStatus({"nextPodOrdinal": 6})
    asyncio.run(_executor(server).apply(writes, "7"))
    assert server.status == {"nextPodOrdinal": 6}


def test_nothing_more_is_begun_after_a_refusal_and_what_was_begun_is_not_forgotten() -> None:
    server = Server(KubeRefused("403: exceeded quota"), fails_from=10)
    refusals = asyncio.run(_executor(server).apply((*_pods(200), DeletePod("old", "uid-of-old", "why"))))
    assert server.num_asked <= 10 + 2 * NUM_PARALLEL
    assert len(refusals) == server.num_asked - 10
    assert len(server.created) == 10
    assert server.deleted == []


def test_the_ordinals_of_pods_that_were_certainly_not_made_are_free_again() -> None:
    """Those that were refused, and those that were not asked for any more; not one of which nobody knows."""
    memory = JobMemory()
    server = Server(KubeRefused("403: exceeded quota"), fails_from=10)
    asyncio.run(_executor(server, memory).apply(_pods(200)))
    made = {int(name.removeprefix("digits-")) for name in server.created}
    assert memory.unused_ordinals == set(range(200)) - made
    asyncio.run(_executor(Server(), memory).apply(_pods(200)))
    assert memory.unused_ordinals == set()
    with pytest.raises(KubeUnavailable):
        asyncio.run(_executor(Server(KubeUnavailable("connection lost"), 0), memory).apply(_pods(1)))
    assert memory.unused_ordinals == set()
    with pytest.raises(KubeRefused):
        status = WriteStatus({"nextPodOrdinal": 3})
        asyncio.run(_executor(Strict("nextPodOrdinal"), memory).apply((status, *_pods(2))))
    assert memory.unused_ordinals == {0, 1}, "nobody was asked"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        pytest.param(KubeUnavailable("429", 1.0), KubeUnavailable, id="429"),
        pytest.param(KubeConflict("409: quota is being changed"), KubeUnavailable, id="409 without such a pod"),
    ],
)
def test_pods_that_the_server_does_not_make_now_are_tried_again(error: KubeError, raised: type[KubeError]) -> None:
    server = Server(error, fails_from=10)
    with pytest.raises(raised):
        asyncio.run(_executor(server).apply(_pods(200)))
    assert server.num_asked <= 10 + 2 * NUM_PARALLEL


def test_a_pod_whose_creation_was_not_answered_is_sought_once_before_the_next_plan() -> None:
    """Else another one would be made beside it, whenever the watch is later than the next plan."""
    server = Server(KubeUnavailable("connection lost"), fails_from=2)
    executor = _executor(server)

    async def scenario() -> None:
        with pytest.raises(KubeUnavailable):
            await executor.apply(_pods(3))
        assert server.sought == []
        await executor.look_for_unsure_pods()
        assert server.sought == ["digits-2"]
        await executor.look_for_unsure_pods()
        assert server.sought == ["digits-2"]

    asyncio.run(scenario())
