"""Taints of devices in ResourceSlices, and which pods they lead away."""

import copy
from typing import Any

import pytest
from tests.unit.unbroken_operator.decisions.test_operator_nodes import running_world

from unbroken_operator.api import layout
from unbroken_operator.decisions.device_taints.reading import sign_of_claim, slice_view, tainted_devices
from unbroken_operator.decisions.snapshot import MAX_CLAIMS, MAX_LEAVING, pod_view

HUGE = "\x1b[2J\u202e\n" + "x" * 10**6
JUNK: tuple[Any, ...] = (None, 7, True, "text", [], {}, [None], [[]], [7], {"a": {}}, [{"name": None}], HUGE, [HUGE])


def a_slice(*taints: dict[str, Any], name: str = "gpu-1", generation: int = 1, **spec: Any) -> dict[str, Any]:
    """Return a ResourceSlice of node a with one sound device, and one with these taints."""
    pool = {"name": "a", "generation": generation, "resourceSliceCount": 1}
    devices = [{"name": "gpu-0"}, {"name": name, "taints": list(taints)}]
    return {"spec": {"driver": "gpu.example.com", "nodeName": "a", "pool": pool, "devices": devices, **spec}}


def a_taint(effect: str = "NoSchedule", key: str = "example.com/broken", value: str = "xid") -> dict[str, Any]:
    return {"key": key, "value": value, "effect": effect, "timeAdded": "2026-01-01T00:00:00Z"}


def a_claim(*tolerations: dict[str, Any], uid: str = "uid-1", device: str = "gpu-1") -> dict[str, Any]:
    """Return a claim of the pod with this uid."""
    result: dict[str, Any] = {"request": "gpu", "driver": "gpu.example.com", "pool": "a", "device": device}
    result |= {"tolerations": list(tolerations)} if tolerations else {}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "digits-0", "uid": uid, "controller": True}
    sound = {"request": "gpu", "driver": "gpu.example.com", "pool": "a", "device": "gpu-0"}
    return {
        "metadata": {"name": "digits-0-gpu-x", "ownerReferences": [owner]},
        "status": {"allocation": {"devices": {"results": [sound, result]}}, "reservedFor": [{"uid": uid}]},
    }


def sign(claim: Any, *slices: Any, uid: str = "uid-1") -> str:
    return sign_of_claim(claim, uid, tainted_devices(map(slice_view, slices), "a"))


SAID = "device gpu-1 of pool a (gpu.example.com) has taint example.com/broken=xid:NoSchedule"


@pytest.mark.parametrize(
    ("taints", "tolerations", "said"),
    [
        ([a_taint()], [], SAID),
        ([a_taint("NoExecute", value="")], [], SAID.replace("=xid:NoSchedule", ":NoExecute")),
        ([a_taint("None")], [], ""),
        ([a_taint("SomethingNew")], [], ""),
        ([], [], ""),
        ([a_taint("None", "other"), a_taint()], [], SAID),
        ([a_taint()], [{"operator": "Exists"}], ""),
        ([a_taint()], [{"key": "example.com/broken", "operator": "Exists"}], ""),
        ([a_taint()], [{"key": "example.com/broken", "value": "xid"}], ""),
        ([a_taint()], [{"key": "example.com/broken", "operator": "Equal", "value": "other"}], SAID),
        ([a_taint()], [{"key": "other", "operator": "Exists"}], SAID),
        ([a_taint()], [{"operator": "Exists", "effect": "NoExecute"}], SAID),
        ([a_taint()], [{"operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 5}], ""),
        ([a_taint("NoExecute")], [{"operator": "Exists"}], ""),
        # It will be evicted when they are over: the ranks are to be elsewhere by then.
        (
            [a_taint("NoExecute")],
            [{"operator": "Exists", "tolerationSeconds": 5}],
            SAID.replace("NoSchedule", "NoExecute"),
        ),
        ([a_taint("NoSchedule", "tolerated"), a_taint()], [{"key": "tolerated", "operator": "Exists"}], SAID),
        ([a_taint()], [{"operator": "Sometimes"}], SAID),
        ([a_taint()], [{"operator": "Equal", "value": "xid"}], SAID),
    ],
)
def test_a_taint_that_the_claim_does_not_tolerate_is_a_sign(
    taints: list[dict[str, Any]], tolerations: list[dict[str, Any]], said: str
) -> None:
    found = sign(a_claim(*tolerations), a_slice(*taints))
    assert found == said


def test_only_devices_that_a_claim_of_this_very_pod_holds_count() -> None:
    tainted = a_slice(a_taint())
    assert sign(a_claim(), tainted) == SAID
    assert sign(a_claim(device="gpu-2"), tainted) == ""
    assert sign(a_claim(uid="uid-2"), tainted) == "", "the claim is another pod's"
    assert sign({**a_claim(), "metadata": {"name": "shared"}}, tainted) == "", "or of several"
    assert sign(a_claim(uid=""), tainted, uid="") == ""
    assert sign(a_claim(), a_slice(a_taint(), nodeName="b")) == "", "the slice is another node's"
    assert sign(a_claim(), a_slice(a_taint(), driver="other.example.com")) == ""


def test_a_slice_that_was_replaced_counts_no_more() -> None:
    old, new = a_slice(a_taint(), generation=4), a_slice(generation=5)
    assert sign(a_claim(), old) == SAID
    assert sign(a_claim(), old, new) == sign(a_claim(), new, old) == ""
    assert sign(a_claim(), a_slice(generation=4), a_slice(a_taint(), generation=5)) == SAID


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk)[:20])
def test_whatever_others_write_into_slices_and_claims_is_read_in_bounds(junk: Any) -> None:
    def spoiled(item: Any, path: tuple[Any, ...]) -> Any:
        result = copy.deepcopy(item)
        place = result
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = junk
        return result

    whole, claim = a_slice(a_taint()), a_claim({"key": "other", "operator": "Exists"})
    spec: tuple[Any, ...] = ("spec",)
    device = (*spec, "devices", 1)
    paths = [spec, (*spec, "pool"), (*spec, "pool", "generation"), (*spec, "driver"), (*spec, "nodeName"), device]
    paths += [(*spec, "devices"), (*device, "name"), (*device, "taints"), (*device, "taints", 0)]
    paths += [(*device, "taints", 0, key) for key in ("key", "value", "effect")]
    for path in paths:
        assert len(sign(claim, spoiled(whole, path))) <= MAX_LEAVING
    results: tuple[Any, ...] = ("status", "allocation", "devices", "results")
    paths = [results[: number + 1] for number in range(4)] + [(*results, 1)]
    paths += [(*results, 1, key) for key in ("driver", "pool", "device", "tolerations")]
    paths += [(*results, 1, "tolerations", 0, key) for key in ("key", "operator", "value", "effect")]
    for path in paths:
        assert len(sign(spoiled(claim, path), whole)) <= MAX_LEAVING


def test_what_is_said_of_a_device_is_one_short_printable_line() -> None:
    slices = a_slice(a_taint(key=HUGE, value=HUGE), name=HUGE, driver=HUGE, pool={"name": HUGE, "generation": 1})
    claim = a_claim()
    claim["status"]["allocation"]["devices"]["results"][1] |= {"driver": HUGE, "pool": HUGE, "device": HUGE}
    said = sign(claim, slices)
    assert said.startswith("device ")
    assert len(said) <= MAX_LEAVING
    assert said.isprintable()


def test_any_number_of_devices_taints_and_results_is_read_in_bounds() -> None:
    many = a_slice()
    many["spec"]["devices"] = [{"name": f"gpu-{number}", "taints": [a_taint()] * 999} for number in range(5000)]
    found = tainted_devices([slice_view(many)] * 3, "a")
    assert len(found) <= 1024
    assert all(len(taints) <= 16 for taints in found.values())
    claim = a_claim()
    claim["status"]["allocation"]["devices"]["results"] *= 10**5
    assert sign(claim, a_slice()) == ""


def test_the_claims_of_a_pod_are_those_that_were_made_for_it() -> None:
    def names(**status: Any) -> tuple[str, ...]:
        spec = {"resourceClaims": [{"name": "shared", "resourceClaimName": "of-all"}]}
        return pod_view({"metadata": {"name": "p", "uid": "u"}, "spec": spec, "status": status}).claims

    made = [{"name": "gpu", "resourceClaimName": "p-gpu-x"}, {"name": "none"}]
    assert names(resourceClaimStatuses=made) == ("p-gpu-x",)
    assert names(extendedResourceClaimStatus={"resourceClaimName": "p-extended"}) == ("p-extended",)
    assert names() == ()
    assert names(resourceClaimStatuses=None, extendedResourceClaimStatus=None) == ()
    assert len(names(resourceClaimStatuses=made * 1000)) <= MAX_CLAIMS
    assert names(resourceClaimStatuses=[{"name": "gpu", "resourceClaimName": HUGE}]) == ()


@pytest.mark.parametrize(("signals", "is_led_away"), [({}, True), ({"devices": "Ignore"}, False)])
def test_ranks_leave_a_pod_with_a_tainted_device_once(signals: dict[str, str], is_led_away: bool) -> None:
    world = running_world(nodeSignals=signals)
    uid = world.pods["digits-0"]["metadata"]["uid"]
    world.tainted_devices[uid] = SAID
    world.settle()
    assert world.told_to_leave() == (["digits-0"] if is_led_away else [])
    if is_led_away:
        assert world.pods["digits-0"]["metadata"]["annotations"][layout.LEAVING_ANNOTATION] == SAID
    # What is marked goes, also if the taint is taken back, and nothing more than that is made or marked.
    world.tainted_devices.clear()
    created = list(world.created)
    world.settle()
    assert world.told_to_leave() == (["digits-0"] if is_led_away else [])
    assert (world.created, world.deleted) == (created, [])


def test_no_ranks_leave_where_the_devices_of_all_pods_are_tainted() -> None:
    world = running_world()
    world.tainted_devices = {pod["metadata"]["uid"]: SAID for pod in world.pods.values()}
    world.settle()
    assert world.told_to_leave() == []
    assert world.deleted == []


def test_no_ranks_leave_before_a_spare_is_ready() -> None:
    world = running_world(spares={"count": 0})
    world.tainted_devices = {world.pods["digits-0"]["metadata"]["uid"]: SAID}
    world.settle()
    assert world.created[-1] == "digits-2", "one more is made for it"
    assert world.told_to_leave() == []
    assert world.deleted == []
