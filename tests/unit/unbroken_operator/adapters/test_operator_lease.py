"""Who leads, in time that passes only while everybody waits."""

import asyncio
import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.unbroken_operator.operator_world import a_job
from tests.unit.unbroken_operator.virtual_time import run

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters.errors import KubeConflict, KubeNotFound, KubeUnavailable
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.lease import Lease, LeaseName, Sighting, is_free, look
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.rendezvous_client import RendezvousApi
from unbroken_operator.config import parse
from unbroken_operator.decisions.snapshot import OperatorOptions
from unbroken_operator.jobs import Jobs

NAME = LeaseName("system", "unbroken")
PATH = "/apis/coordination.k8s.io/v1/namespaces/system/leases"


class ApiServer:
    """Holds one Lease as an API server does: a write for another version than the stored one is refused."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.is_up = True
        self.is_silent = False
        self._version = 0

    async def _answer(self) -> None:
        while self.is_silent:
            await asyncio.sleep(1.0)
        if not self.is_up:
            raise KubeUnavailable("503")

    def _store(self, item: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self.lease = item
        return copy.deepcopy(item)

    async def get(self, path: str) -> dict[str, Any]:
        await self._answer()
        assert path == f"{PATH}/unbroken"
        if self.lease is None:
            raise KubeNotFound("404")
        return copy.deepcopy(self.lease)

    async def create(self, path: str, item: Mapping[str, Any]) -> dict[str, Any]:
        await self._answer()
        assert path == PATH
        if self.lease is not None:
            raise KubeConflict("409 exists")
        return self._store(copy.deepcopy(dict(item)))

    async def merge(self, path: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        await self._answer()
        assert path == f"{PATH}/unbroken"
        if self.lease is None:
            raise KubeNotFound("404")
        if patch["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise KubeConflict("409 changed")
        return self._store({**self.lease, "spec": {**self.lease["spec"], **patch["spec"]}})

    @property
    def holder(self) -> str:
        """Who has it."""
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


def candidate(server: ApiServer, identity: str) -> Lease:
    """Return one who wants to lead."""
    return Lease(cast(Kube, server), NAME, identity, 8)


def now_s() -> float:
    """Return the virtual time."""
    return asyncio.get_running_loop().time()


async def until(condition: Any) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(1000):
        while not condition():
            await asyncio.sleep(0.1)


def test_the_first_one_leads_and_the_second_waits_for_as_long_as_the_lease_is_renewed() -> None:
    async def scenario() -> None:
        server = ApiServer()
        first, second = candidate(server, "first"), candidate(server, "second")
        await first.acquire()
        keeping, waiting = asyncio.create_task(first.keep()), asyncio.create_task(second.acquire())
        await asyncio.sleep(1000)
        assert (server.holder, first.may_act, second.may_act, second.is_in_touch) == ("first", True, False, True)
        keeping.cancel()
        waiting.cancel()

    run(scenario())


def test_a_silent_leader_is_followed_after_the_time_of_the_lease_and_acts_no_more_before() -> None:
    async def scenario() -> None:
        server = ApiServer()
        first, second = candidate(server, "first"), candidate(server, "second")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(5.4)
        assert not first.may_act
        assert not second.may_act
        await waiting
        assert 8.0 <= now_s() <= 9.1
        assert server.holder == "second"
        assert server.lease is not None
        assert server.lease["spec"]["leaseTransitions"] == 1
        assert await first.keep() == "second"
        assert not first.may_act

    run(scenario())


def test_a_leader_that_ends_well_is_followed_within_the_next_look() -> None:
    async def scenario() -> None:
        server = ApiServer()
        first, second = candidate(server, "first"), candidate(server, "second")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(0.5)
        await first.release()
        assert not first.may_act
        await waiting
        assert now_s() <= 1.1

    run(scenario())


@pytest.mark.parametrize("trouble", ["is down", "is silent"])
def test_an_api_server_that_is_away_takes_the_lead_from_nobody(trouble: str) -> None:
    async def scenario() -> None:
        server = ApiServer()
        first, second = candidate(server, "first"), candidate(server, "second")
        await first.acquire()
        keeping, waiting = asyncio.create_task(first.keep()), asyncio.create_task(second.acquire())
        await asyncio.sleep(20)
        server.is_up, server.is_silent = trouble != "is down", trouble == "is silent"
        await asyncio.sleep(100)
        assert not first.may_act, "it cannot know that nobody else leads"
        assert not keeping.done()
        # The leader is back first: it renews. Had the other one been, it would have taken the lease.
        waiting.cancel()
        server.is_up, server.is_silent = True, False
        await until(lambda: first.may_act)
        assert server.holder == "first"
        keeping.cancel()

    run(scenario())


class Empty:
    """An API server that has none of the jobs' objects."""

    async def get(self, _path: str) -> dict[str, Any]:
        """See Kube."""
        raise KubeNotFound("404")

    def is_token_old(self, _target: object) -> bool:
        """See RendezvousApi."""
        return False


def test_while_the_lease_is_out_of_reach_one_line_says_so_for_all_jobs(caplog: pytest.LogCaptureFixture) -> None:
    """Before, each job said so about each second, as often as it tried."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        server = ApiServer()
        first = candidate(server, "first")
        await first.acquire()
        keeping = asyncio.create_task(first.keep())
        empty, metrics, options = Empty(), OperatorMetrics(), OperatorOptions("s:1")
        client = cast(RendezvousApi, empty)
        jobs = Jobs(cast(Kube, empty), client, options, metrics, (), may_act=lambda: first.may_act)
        server.is_up = False
        await until(lambda: not first.may_act)
        for number in range(20):
            jobs.observe("ADDED", a_job(f"job-{number}"))
        await asyncio.sleep(60)
        assert (metrics.registry.get_sample_value("unbroken_operator_reconcile_errors_total") or 0) > 200
        await jobs.stop()
        server.is_up = True
        await until(lambda: first.may_act)
        await asyncio.sleep(1)
        keeping.cancel()

    run(scenario())
    said = [record.getMessage() for record in caplog.records if "lease" in record.getMessage()]
    assert [text for text in said if "job=" in text] == []
    assert [text.partition(" lease=")[0] for text in said if "jobs" in text] == [
        "all jobs wait: the lease cannot be renewed, another may hold it",
        "jobs go on: the lease is renewed",
    ]


def test_a_lease_that_somebody_changed_or_deleted_is_still_held() -> None:
    async def scenario() -> None:
        server = ApiServer()
        first = candidate(server, "first")
        await first.acquire()
        keeping = asyncio.create_task(first.keep())
        await asyncio.sleep(10)
        assert server.lease is not None
        server.lease["metadata"] |= {"annotations": {"seen-by": "a person"}, "resourceVersion": "1000"}
        await asyncio.sleep(10)
        assert first.may_act
        server.lease = None
        await asyncio.sleep(10)
        assert (first.may_act, keeping.done(), server.holder) == (True, False, "first")
        keeping.cancel()

    run(scenario())


@pytest.mark.parametrize("duration", ["8", {"s": 8}, "eight", 10**400])
def test_a_lease_that_cannot_be_read_does_not_end_the_election(duration: Any) -> None:
    async def scenario() -> None:
        server = ApiServer()
        first, second = candidate(server, "first"), candidate(server, "second")
        await first.acquire()
        assert server.lease is not None
        server.lease["spec"]["leaseDurationSeconds"] = duration
        server.lease["metadata"]["resourceVersion"] = "1000"
        keeping, waiting = asyncio.create_task(first.keep()), asyncio.create_task(second.acquire())
        await asyncio.sleep(20)
        assert not waiting.done() or second.may_act
        assert not keeping.done() or keeping.exception() is None
        keeping.cancel()
        waiting.cancel()

    run(scenario())


def test_of_two_that_find_no_lease_one_leads() -> None:
    async def scenario() -> None:
        server = ApiServer()
        both = [candidate(server, name) for name in ("first", "second")]
        tasks = [asyncio.create_task(one.acquire()) for one in both]
        await asyncio.sleep(4)
        assert sorted(one.may_act for one in both) == [False, True]
        assert sorted(task.done() for task in tasks) == [False, True]
        for task in tasks:
            task.cancel()

    run(scenario())


def test_the_time_of_another_host_does_not_matter() -> None:
    item: dict[str, Any] = {
        "metadata": {"resourceVersion": "7"},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 8, "renewTime": "1999-01-01T00:00:00.000000Z"},
    }
    seen = look(None, item, 100.0)
    assert seen == Sighting("7", "a", 8.0, 0, 100.0)
    assert look(seen, item, 105.0) is seen
    assert [is_free(seen, "b", now) for now in (100.0, 107.9, 108.0)] == [False, False, True]
    assert is_free(seen, "a", 100.0)
    item["metadata"]["resourceVersion"] = "8"
    assert look(seen, item, 105.0).since_s == 105.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lease", "unbroken"], "--lease: must be NAMESPACE/NAME"),
        (["--lease", "a/B"], "--lease: must be NAMESPACE/NAME"),
        (["--lease", "a/b", "--lease-seconds", "0"], "--lease-seconds: must be 1 to 3600, got 0"),
    ],
)
def test_a_wrong_lease_is_refused_at_the_start(arguments: list[str], message: str, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.touch()
    with pytest.raises(InputError, match=message):
        parse(["--all-namespaces", "--kubeconfig", str(kubeconfig), *arguments])
