"""How taints of devices are looked for: how often, how much of them, and what an API server that refuses brings."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
from tests.unit.unbroken_operator.decisions.test_operator_device_taints import SAID, a_claim, a_slice, a_taint
from tests.unit.unbroken_operator.decisions.test_operator_memory import a_pod
from tests.unit.unbroken_operator.operator_world import a_job

from unbroken_operator.adapters.device_taints.looking import (
    MAX_CLAIMS,
    MAX_NODES,
    MAX_SLICES,
    REST_S,
    Claimant,
    DeviceTaints,
)
from unbroken_operator.adapters.errors import KubeError, KubeNotFound, KubeNotServed, KubeRefused, KubeUnavailable
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.metrics import OperatorMetrics
from unbroken_operator.adapters.rendezvous_client import RendezvousApi
from unbroken_operator.adapters.stores import PodStore
from unbroken_operator.decisions.snapshot import OperatorOptions
from unbroken_operator.jobs import Jobs

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}"
POD = Claimant("ml", "uid-1", "a", ("digits-0-gpu-x",))


class Devices:
    """An API server with slices by node and claims by path, and the looks at it."""

    def __init__(self, *pods: Claimant) -> None:
        self.pods = list(pods)
        self.slices: dict[str, list[dict[str, Any]]] = {}
        self.claims: dict[str, dict[str, Any]] = {}
        self.refusal: KubeError | None = None
        self.unreadable = ""
        """A node whose slices cannot be read."""
        self.claims_refusal: KubeError | None = None
        self.calls: list[str] = []
        self.now_s = 0.0
        self.found: dict[str, str] = {}
        self._looker = DeviceTaints(cast(Kube, self), lambda: self.pods, self._take, clock=lambda: self.now_s)

    def _take(self, found: Any) -> None:
        self.found = dict(found)

    def look(self) -> list[str]:
        """Look once; return what was asked for."""
        self.calls = []
        asyncio.run(self._looker.look())
        self.now_s += 30.0
        return self.calls

    async def list(
        self, path: str, *, fields: str, most: int, read: Callable[[dict[str, Any]], Any]
    ) -> tuple[list[Any], str]:
        assert (path, most) == (SLICES, MAX_SLICES + 1)
        self.calls.append(fields)
        if self.refusal is not None:
            raise self.refusal
        if fields == f"spec.nodeName={self.unreadable}":
            raise KubeUnavailable("500")
        return [read(item) for item in self.slices.get(fields.removeprefix("spec.nodeName="), ())[:most]], "1"

    async def get(self, path: str) -> dict[str, Any]:
        self.calls.append(path)
        if self.claims_refusal is not None:
            raise self.claims_refusal
        if path not in self.claims:
            raise KubeNotFound(path)
        return self.claims[path]


def tainted() -> Devices:
    """Return one whose pod has a tainted device."""
    devices = Devices(POD)
    devices.slices["a"] = [a_slice(a_taint())]
    devices.claims[CLAIMS.format("ml", "digits-0-gpu-x")] = a_claim()
    return devices


def test_without_claims_nothing_is_asked() -> None:
    devices = Devices()
    assert devices.look() == []
    assert devices.found == {}


def test_claims_are_asked_for_only_where_a_device_is_tainted() -> None:
    devices = tainted()
    devices.pods += [Claimant("ml", "uid-2", "b", ("digits-1-gpu-y",)), Claimant("ml", "uid-3", "b", ("other",))]
    devices.slices["b"] = [a_slice(nodeName="b")]
    asked = ["spec.nodeName=a", CLAIMS.format("ml", "digits-0-gpu-x"), "spec.nodeName=b"]
    assert devices.look() == asked
    assert devices.found == {"uid-1": SAID}
    devices.slices["a"] = [a_slice()]
    assert devices.look() == ["spec.nodeName=a", "spec.nodeName=b"]
    assert devices.found == {}, "the taint was taken back"


def test_a_pod_that_is_gone_is_forgotten() -> None:
    devices = tainted()
    devices.look()
    devices.pods = []
    assert devices.look() == []
    assert devices.found == {}


@pytest.mark.parametrize("refusal", [KubeNotServed("404"), KubeNotFound("404"), KubeRefused("403")])
def test_a_server_that_serves_no_slices_or_shows_them_to_others_only_is_asked_seldom(
    refusal: KubeError, caplog: pytest.LogCaptureFixture
) -> None:
    devices = tainted()
    devices.refusal = refusal
    with caplog.at_level(logging.INFO):
        assert devices.look() == ["spec.nodeName=a"]
        while devices.now_s < REST_S:
            assert devices.look() == []
        assert devices.look() == ["spec.nodeName=a"]
    assert [item.getMessage()[:33] for item in caplog.records] == ["taints of devices are not read wh"]
    devices.refusal = None
    devices.now_s += REST_S
    devices.look()
    assert devices.found == {"uid-1": SAID}


def test_what_cannot_be_read_for_a_moment_stays_as_it_was_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    devices = tainted()
    devices.look()
    devices.slices["a"] = []
    devices.refusal = KubeUnavailable("503")
    assert devices.look() == devices.look() == ["spec.nodeName=a"]
    assert devices.found == {"uid-1": SAID}
    assert len(caplog.records) == 1
    devices.refusal = None
    devices.look()
    assert devices.found == {}


def test_claims_that_cannot_be_read_hold_up_no_other_namespace(caplog: pytest.LogCaptureFixture) -> None:
    devices = tainted()
    devices.claims_refusal = KubeRefused("403")
    devices.look()
    devices.pods.append(Claimant("other", "uid-2", "a", ("digits-0-gpu-x",)))
    assert len(devices.look()) == 3
    assert devices.found == {}
    assert len(caplog.records) == 2, "once for each namespace"
    devices.claims_refusal = None
    devices.claims[CLAIMS.format("other", "digits-0-gpu-x")] = a_claim(uid="uid-2")
    devices.look()
    assert set(devices.found) == {"uid-1", "uid-2"}


def test_a_node_whose_slices_cannot_be_read_holds_up_no_other_one_for_long(caplog: pytest.LogCaptureFixture) -> None:
    devices = tainted()
    devices.pods.append(Claimant("ml", "uid-0", "_", ("digits-0-gpu-x",)))
    devices.unreadable = "_"
    assert devices.look() == ["spec.nodeName=_"], "an API server that is away is not asked for each node"
    devices.look()
    assert devices.found == {"uid-1": SAID}
    devices.look()
    assert len(caplog.records) == 1, "said once"
    devices.unreadable = "a"
    devices.slices = {"_": [a_slice(a_taint(), nodeName="_")]}
    devices.claims = {CLAIMS.format("ml", "digits-0-gpu-x"): a_claim(uid="uid-0")}
    for _ in range(2):
        devices.look()
    assert set(devices.found) == {"uid-0", "uid-1"}, "what cannot be read stays as it was"


def test_of_many_nodes_all_have_their_turn() -> None:
    devices = Devices(
        *(Claimant("ml", f"uid-{number}", f"node-{number}", ("c",)) for number in range(2 * MAX_NODES + 5))
    )
    rounds = [devices.look() for _ in range(3)]
    assert [len(asked) for asked in rounds] == [MAX_NODES] * 3
    assert len({node for asked in rounds for node in asked}) == len(devices.pods)


def test_of_many_claims_on_a_node_a_bounded_number_is_read() -> None:
    devices = Devices(*(Claimant("ml", f"uid-{number}", "a", ("b", "c")) for number in range(500)))
    devices.slices["a"] = [a_slice(a_taint())]
    assert len(devices.look()) == 1 + MAX_CLAIMS


def test_what_is_too_much_to_be_read_is_said_until_it_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """Seen before: taints of the slices beyond the limit moved nobody, and nothing said that they were not read."""
    devices = tainted()
    devices.slices["a"] = [a_slice()] * MAX_SLICES + [a_slice(a_taint())]
    devices.look()
    devices.look()
    assert devices.found == {}
    told = "taints of devices are not read what=slices of a error=it has more than 200; the rest are not looked at"
    assert [record.getMessage() for record in caplog.records] == [told]
    devices.slices["a"] = [a_slice(a_taint())]
    devices.pods = [Claimant("ml", "uid-1", "a", ("digits-0-gpu-x",) * (MAX_CLAIMS + 1))]
    devices.look()
    assert "what=claims of pods on a error=they have more than 64; the rest" in caplog.text
    caplog.clear()
    devices.pods = [POD]
    devices.look()
    assert not caplog.records
    devices.slices["a"] = [a_slice()] * (MAX_SLICES + 1)
    devices.look()
    assert told in caplog.text, "once more"


def test_names_of_claims_stay_names_in_paths() -> None:
    devices = tainted()
    devices.pods = [Claimant("ml", "uid-1", "a", ("../../secrets/x?y",))]
    assert devices.look()[1] == CLAIMS.format("ml", "..%2F..%2Fsecrets%2Fx%3Fy")


def test_the_job_of_a_pod_is_woken_when_what_is_known_of_its_devices_changes_and_only_then() -> None:
    woken: list[tuple[str, str]] = []
    pods = PodStore(woken.append)
    for number in range(2):
        item = a_pod(f"digits-{number}", version=1, uid=f"uid-{number}")
        item["metadata"]["labels"]["unbroken.dev/job"] = f"job-{number}"
        pods.upsert(item)
    woken.clear()
    for found in ({}, {"uid-1": SAID}, {"uid-1": SAID}, {"uid-1": SAID, "elsewhere": SAID}, {}):
        pods.note_tainted(found)
    assert woken == [("ml", "job-1")] * 2


@pytest.mark.parametrize(
    ("spec", "is_minded"),
    [
        ({}, True),
        ({"nodeSignals": {"cordon": "Ignore"}}, True),
        ({"nodeSignals": {"devices": "Move"}}, True),
        ({"nodeSignals": {"devices": "Ignore"}}, False),
        ({"nodeSignals": [7]}, True),
    ],
)
def test_nothing_is_asked_for_jobs_that_ignore_devices(spec: dict[str, Any], is_minded: bool) -> None:
    item = a_pod("digits-0", version=1, uid="uid-1")
    owner = {"kind": "ResilientTrainingJob", "uid": "uid-of-digits", "controller": True}
    item["metadata"]["ownerReferences"] = [owner]
    item["spec"] = {"nodeName": "a"}
    item["status"]["resourceClaimStatuses"] = [{"name": "gpu", "resourceClaimName": "digits-0-gpu-x"}]

    async def scenario() -> list[Claimant]:
        jobs = Jobs(cast(Kube, None), cast(RendezvousApi, None), OperatorOptions("s:1"), OperatorMetrics(), ())
        jobs._shared.pods.upsert(item)
        jobs.observe("ADDED", a_job(**spec))
        found = list(jobs.claimants())
        await jobs.stop()
        return found

    wanted = [Claimant("ml", "uid-1", "a", ("digits-0-gpu-x",))]
    assert asyncio.run(scenario()) == (wanted if is_minded else [])


@pytest.mark.parametrize(
    ("changes", "is_asked_about"),
    [
        ({}, True),
        ({"claims": None}, False),
        ({"nodeName": ""}, False),
        ({"phase": "Failed"}, False),
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, False),
        ({"leaving": "wanted"}, False),
        ({"owner": "another"}, False),
    ],
)
def test_only_pods_that_train_and_stay_are_looked_at(changes: dict[str, Any], is_asked_about: bool) -> None:
    item = a_pod("digits-0", version=1, uid="uid-1")
    item["metadata"]["labels"]["unbroken.dev/component"] = "trainer"
    owner = {"kind": "ResilientTrainingJob", "uid": changes.get("owner", "uid-of-digits"), "controller": True}
    item["metadata"]["ownerReferences"] = [owner]
    item["metadata"].setdefault("annotations", {})["unbroken.dev/leaving"] = changes.get("leaving", "")
    if "deletionTimestamp" in changes:
        item["metadata"]["deletionTimestamp"] = changes["deletionTimestamp"]
    item["spec"] = {"nodeName": changes.get("nodeName", "a")}
    claims = [{"name": "gpu", "resourceClaimName": "digits-0-gpu-x"}] if "claims" not in changes else None
    item["status"] = {"phase": changes.get("phase", "Running"), "resourceClaimStatuses": claims}
    pods = PodStore(lambda _key: None)
    pods.upsert(item)
    key = ("ml", item["metadata"]["labels"]["unbroken.dev/job"])
    assert [pod.uid for pod in pods.claimants(key, "uid-of-digits")] == (["uid-1"] if is_asked_about else [])
