"""Buddies: whose copies lie where."""

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken_core.ranks.buddies import CopyHolder, Ring, assign_buddies
from unbroken_core.vocabulary.checkpoints import MAX_COPIES

RACK, HOST, POD = 0, 1, 2


def keepers(*racks: int, spares: int = 0) -> list[CopyHolder]:
    """Pods, one a host: so many in each rack. The last ones are spares."""
    pods = [(f"rack-{rack}", number) for rack, size in enumerate(racks) for number in range(size)]
    return [
        CopyHolder(f"{rack}.{number}", (rack, f"host-{number}"), is_active=place < len(pods) - spares)
        for place, (rack, number) in enumerate(pods)
    ]


@st.composite
def some_keepers(draw: st.DrawFn) -> list[CopyHolder]:
    names = st.sampled_from(["", "a", "b", "c", "d"])
    places = draw(st.lists(st.tuples(names, names, st.booleans()), max_size=24))
    return [CopyHolder(f"pod-{number}", (rack, host), active) for number, (rack, host, active) in enumerate(places)]


def are_surely_apart(one: CopyHolder, other: CopyHolder, depth: int) -> bool:
    """Whether they differ in a layer in which both are known."""
    names = zip(one.domains[: depth + 1], other.domains, strict=False)
    return any("" not in (mine, others) and mine != others for mine, others in names)


def check(pods: list[CopyHolder], rings: list[Ring], copies: int) -> None:
    """What holds of every assignment."""
    by_uid = {pod.uid: pod for pod in pods}
    members = [uid for ring in rings for uid in ring.members]
    assert len(members) == len(set(members)), "a pod is in two rings"
    assert set(members) <= set(by_uid)
    active = {pod.uid for pod in pods if pod.is_active}
    if len(pods) > copies:
        assert active <= set(members), "somebody has no buddies though there are enough pods"
    for ring in rings:
        assert copies < len(ring.members) <= 2 * copies + 1
        assert active & set(ring.members)
        for one, other in combinations([by_uid[uid] for uid in ring.members], 2):
            assert ring.depth == POD or are_surely_apart(one, other, ring.depth), "two that may be of one domain"
        kept = Counter(holder for uid in ring.members for holder in ring.holders(uid, copies))
        assert set(kept.values()) == {copies}, "one keeps more copies than it has"
        assert all(uid not in ring.holders(uid, copies) for uid in ring.members)


@given(some_keepers(), st.integers(1, MAX_COPIES), st.sampled_from([RACK, HOST]))
def test_each_active_pod_has_as_many_holders_as_there_are_copies(
    pods: list[CopyHolder], copies: int, depth: int
) -> None:
    check(pods, assign_buddies(pods, copies, depth), copies)


@given(some_keepers(), st.integers(1, MAX_COPIES), st.randoms(use_true_random=False))
def test_the_order_of_the_pods_does_not_matter(pods: list[CopyHolder], copies: int, chance: random.Random) -> None:
    shuffled = list(pods)
    chance.shuffle(shuffled)
    assert assign_buddies(shuffled, copies, RACK) == assign_buddies(pods, copies, RACK)


def test_of_a_ring_that_is_divided_no_half_has_spares_alone() -> None:
    apart = [CopyHolder(f"pod-{number}", (name,), number > 1) for number, name in enumerate("abcd")]
    before = [Ring(("pod-0", "pod-1", "pod-2"), 0)]
    assert [ring.members for ring in assign_buddies(apart, 1, 0, before)] == [("pod-2", "pod-3")]


@given(some_keepers(), some_keepers(), st.integers(1, MAX_COPIES))
def test_what_held_before_never_breaks_what_must_hold_now(
    before: list[CopyHolder], now: list[CopyHolder], copies: int
) -> None:
    check(now, assign_buddies(now, copies, RACK, assign_buddies(before, copies, RACK)), copies)


@given(some_keepers(), st.integers(1, MAX_COPIES))
def test_asking_again_changes_nothing(pods: list[CopyHolder], copies: int) -> None:
    rings = assign_buddies(pods, copies, RACK)
    again = assign_buddies(pods, copies, RACK, rings)
    assert {ring.members for ring in again} == {ring.members for ring in rings}


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(1, MAX_COPIES))
def test_no_rack_is_used_twice_while_no_rack_has_too_many_pods(racks: list[int], copies: int) -> None:
    pods = keepers(*racks)
    rings = assign_buddies(pods, copies, RACK)
    if max(racks) * (copies + 1) <= sum(racks):
        assert {ring.depth for ring in rings} == {RACK}


@pytest.mark.parametrize("copies", [1, 2])
def test_a_lost_pod_moves_the_copies_of_few(copies: int) -> None:
    pods = keepers(*[8] * 8)
    rings = assign_buddies(pods, copies, RACK)
    for lost in pods:
        left = [pod for pod in pods if pod is not lost]
        after = assign_buddies(left, copies, RACK, rings)
        check(left, after, copies)
        assert {ring.depth for ring in after} == {RACK}
        moved = [ring for ring in after if ring not in rings]
        assert len(moved) <= 1 + copies
        assert sum(len(ring.members) for ring in moved) <= (copies + 1) * (copies + 2)


def test_a_replacement_pairs_with_whom_the_lost_pod_has_left() -> None:
    pods = keepers(2, 2)
    rings = assign_buddies(pods, 1, RACK)
    assert {ring.members for ring in rings} == {("rack-0.0", "rack-1.0"), ("rack-0.1", "rack-1.1")}
    now = [*pods[:3], CopyHolder("new", ("rack-1", "host-7"))]
    assert {ring.members for ring in assign_buddies(now, 1, RACK, rings)} == {
        ("rack-0.0", "rack-1.0"),
        ("rack-0.1", "new"),
    }


def test_a_spare_keeps_copies_where_no_active_pod_is_left() -> None:
    pods = keepers(1, 2, spares=1)
    assert assign_buddies(keepers(2, 1, spares=1), 1, HOST) == [Ring(("rack-0.0", "rack-0.1"), HOST)]
    (ring,) = assign_buddies(pods[:1] + pods[2:], 1, RACK)
    assert ring == Ring(("rack-0.0", "rack-1.1"), RACK)


def test_spares_alone_form_no_ring() -> None:
    assert assign_buddies(keepers(2, 2, spares=4), 1, RACK) == []


def test_pods_of_one_rack_use_its_hosts_and_say_so() -> None:
    rings = assign_buddies(keepers(4), 1, RACK)
    assert [ring.depth for ring in rings] == [HOST, HOST]


def test_pods_of_one_host_are_the_last_resort() -> None:
    pods = [CopyHolder(f"pod-{number}", ("rack", "host")) for number in range(3)]
    assert assign_buddies(pods, 1, RACK) == [Ring(("pod-0", "pod-1", "pod-2"), POD)]


def test_unknown_domains_are_not_taken_for_different_ones() -> None:
    pods = [CopyHolder("pod-0", ("", "host-0")), CopyHolder("pod-1", ("", "host-1"))]
    assert assign_buddies(pods, 1, RACK) == [Ring(("pod-0", "pod-1"), HOST)]


def test_a_rack_that_is_not_known_may_be_that_of_the_others() -> None:
    pods = [CopyHolder("pod-0", ("rack-1", "host-0")), CopyHolder("pod-1", ("", "host-1"))]
    assert assign_buddies(pods, 1, RACK) == [Ring(("pod-1", "pod-0"), HOST)]
    others = [CopyHolder(f"pod-{number}", (f"rack-{number}", f"host-{number}")) for number in (2, 3)]
    assert assign_buddies([*pods, *others], 1, RACK) == [Ring(("pod-0", "pod-2"), RACK), Ring(("pod-3", "pod-1"), HOST)]


def test_one_host_name_in_a_known_and_an_unknown_rack_may_be_one_host() -> None:
    pods = [CopyHolder("pod-0", ("rack-1", "host-0")), CopyHolder("pod-1", ("", "host-0"))]
    assert assign_buddies(pods, 1, HOST) == [Ring(("pod-1", "pod-0"), POD)]


def test_racks_of_one_name_in_two_zones_are_two_racks() -> None:
    pods = [CopyHolder("pod-0", ("zone-a", "rack-1", "h0")), CopyHolder("pod-1", ("zone-b", "rack-1", "h1"))]
    assert assign_buddies(pods, 1, 1) == [Ring(("pod-0", "pod-1"), 1)]


def test_rings_that_were_too_near_are_formed_anew_once_somebody_comes() -> None:
    pods = keepers(4)
    rings = assign_buddies(pods, 1, RACK)
    assert {ring.depth for ring in rings} == {HOST}
    more = [*pods, *(CopyHolder(f"new-{number}", ("rack-9", f"host-{number}")) for number in range(4))]
    assert {ring.depth for ring in assign_buddies(more, 1, RACK, rings)} == {RACK}


def test_a_job_of_a_single_pod_has_no_buddies() -> None:
    assert assign_buddies(keepers(1), 1, RACK) == []
    assert assign_buddies([], 1, RACK) == []


@pytest.mark.parametrize("copies", [0, -1, MAX_COPIES + 1, 2**70])
def test_absurd_numbers_of_copies_are_refused(copies: int) -> None:
    with pytest.raises(ValueError, match="copies: want 1 to 3"):
        assign_buddies(keepers(2, 2), copies, RACK)


def test_the_largest_jobs_are_assigned_in_few_steps() -> None:
    """No loop over all rings for each pod: one rack that has most of the pods was the case that showed it."""
    pods = [
        CopyHolder(f"pod-{number}", ("a" if number < 12_000 else "b", f"host-{number}")) for number in range(16_384)
    ]
    rings = assign_buddies(pods, 1, RACK)
    check(pods, rings, 1)
    assert Counter(ring.depth for ring in rings) == {RACK: 4384, HOST: 3808}
