"""Who is which active rank."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken_core.assignment import Assignment, Outcome, Rules, Shortage, Slot, assign_first, assign_next
from unbroken_core.settings import Layer
from unbroken_core.topology import Topology

LAYERS = (Layer("rack", "rack"), Layer("nvlink", "nvlink"))


def rules(replicas: int, ranks_per_pod: int = 2, **changes: object) -> Rules:
    base = Rules(replicas, 1, ranks_per_pod, ranks_per_pod, None, 1, LAYERS)
    return replace(base, **changes)  # type: ignore[arg-type]


def tree(pods: dict[str, str]) -> Topology:
    topology = Topology(2)
    for name, domains in pods.items():
        topology.place(name, name, domains.split("/"))
    return topology


def whole(*pods: str, ranks_per_pod: int = 2) -> dict[str, tuple[int, ...]]:
    return {pod: tuple(range(ranks_per_pod)) for pod in pods}


def pods_of(outcome: Outcome) -> list[str]:
    assert isinstance(outcome, Assignment), outcome
    return [slot.pod_uid for slot in outcome.slots]


EIGHT = {f"p{n}": f"r{n // 4}/n{n // 2}" for n in range(8)}
"""Two racks of two NVLink domains of two pods."""


def test_the_first_plan_follows_the_tree_not_the_order_of_arrival() -> None:
    topology = tree(EIGHT)
    ready = whole("p5", "p0", "p3", "p4")
    assert pods_of(assign_first(topology, rules(4), ready, frozenset())) == ["p0", "p3", "p4", "p5"]


def test_the_first_plan_prefers_pods_that_were_made_active() -> None:
    topology = tree(EIGHT)
    outcome = assign_first(topology, rules(2), whole("p0", "p1", "p2"), {"p1", "p2"})
    assert pods_of(outcome) == ["p1", "p2"]


def first(topology: Topology, rule: Rules, *pods: str) -> Assignment:
    outcome = assign_first(topology, rule, whole(*pods, ranks_per_pod=rule.ranks_per_pod), set(pods))
    assert isinstance(outcome, Assignment)
    return outcome


def test_a_lost_pods_ranks_go_to_the_nearest_spare_in_local_order() -> None:
    """0.43"""
    topology, rule = tree(EIGHT), rules(3)
    before = first(topology, rule, "p0", "p2", "p4")
    after = assign_next(topology, rule, whole("p0", "p4", "p7", "p6", "p3"), before, may_promote=True)
    assert pods_of(after) == ["p0", "p3", "p4"]
    assert isinstance(after, Assignment)
    assert after.promoted == ("p3",)
    assert after.ranks_by_pod()["p3"] == {0: 2, 1: 3}


def test_a_lost_domain_goes_to_a_whole_spare_domain() -> None:
    topology, rule = tree(EIGHT), rules(4)
    before = first(topology, rule, "p0", "p1", "p4", "p5")
    # p2 is nearer to p0, but only p6 and p7 are a whole NVLink domain; p2's neighbour is not there.
    after = assign_next(topology, rule, whole("p4", "p5", "p2", "p6", "p7"), before, may_promote=True)
    assert pods_of(after) == ["p6", "p7", "p4", "p5"]


def test_a_lost_domain_without_a_whole_spare_domain_is_filled_pod_by_pod() -> None:
    topology, rule = tree(EIGHT), rules(4)
    before = first(topology, rule, "p0", "p1", "p4", "p5")
    after = assign_next(topology, rule, whole("p4", "p5", "p2", "p6"), before, may_promote=True)
    assert pods_of(after) == ["p2", "p6", "p4", "p5"]


def test_without_a_spare_those_behind_move_up() -> None:
    topology, rule = tree(EIGHT), rules(3)
    before = first(topology, rule, "p0", "p1", "p2")
    after = assign_next(topology, rule, whole("p0", "p2"), before, may_promote=True)
    assert after == Assignment((Slot("p0", (0, 1)), Slot("p2", (0, 1))), 4, (), 2)


def test_spares_are_left_alone_when_they_may_not_be_promoted() -> None:
    topology, rule = tree(EIGHT), rules(2)
    before = first(topology, rule, "p0", "p1")
    assert pods_of(assign_next(topology, rule, whole("p0", "p2"), before, may_promote=False)) == ["p0"]


def test_the_world_grows_back_from_the_healthy_count() -> None:
    """0.45: sizes are computed from all that is healthy, not from the last size."""
    topology, rule = tree(EIGHT), rules(6, divisible_by=8)
    line: Outcome = first(topology, rule, "p0", "p1", "p2", "p3", "p4", "p5")
    sizes = [line.world_size] if isinstance(line, Assignment) else []
    for alive in (("p0", "p1", "p2", "p3", "p5"), ("p0", "p2", "p3", "p5"), ("p0", "p2", "p3", "p5", "p6", "p7")):
        assert isinstance(line, Assignment)
        line = assign_next(topology, rule, whole(*alive), line, may_promote=True)
        assert isinstance(line, Assignment)
        sizes.append(line.world_size)
    assert isinstance(line, Assignment)
    assert sizes == [8, 8, 8, 8]
    assert len(line.slots) == 6


def test_too_few_pods_are_a_shortage_with_numbers() -> None:
    topology, rule = tree(EIGHT), rules(3, minimum_replicas=3)
    before = first(topology, rule, "p0", "p1", "p2")
    after = assign_next(topology, rule, whole("p0", "p2"), before, may_promote=True)
    assert after == Shortage(2, 4, "2 healthy pods of at least 3")


def test_a_divisor_that_leaves_nothing_is_a_shortage() -> None:
    outcome = assign_first(tree(EIGHT), rules(2, divisible_by=4), whole("p0"), set())
    assert outcome == Shortage(1, 2, "2 healthy ranks, a multiple of 4 is wanted")


def test_a_domain_with_too_few_ranks_gives_up_all_of_them() -> None:
    """0.32, 0.33"""
    layers = (Layer("rack", "rack"), Layer("nvlink", "nvlink", min_ranks=4))
    rule = rules(4, layers=layers)
    before = first(tree(EIGHT), rule, "p0", "p1", "p2", "p3")
    assert pods_of(assign_next(tree(EIGHT), rule, whole("p0", "p2", "p3"), before, may_promote=True)) == ["p2", "p3"]


def test_a_domain_never_holds_more_active_ranks_than_it_may() -> None:
    """0.29, 0.44: after replacements as well."""
    layers = (Layer("rack", "rack", max_ranks=4), Layer("nvlink", "nvlink"))
    rule = rules(4, layers=layers)
    before = first(tree(EIGHT), rule, "p0", "p1", "p2", "p4", "p5")
    assert pods_of(before) == ["p0", "p1", "p4", "p5"]
    after = assign_next(tree(EIGHT), rule, whole("p0", "p1", "p2", "p3", "p5"), before, may_promote=True)
    assert pods_of(after) == ["p0", "p1", "p5"]


def test_a_split_pod_goes_on_with_the_workers_that_it_has() -> None:
    rule = rules(2, 4, minimum_ranks_per_pod=3)
    before = first(tree(EIGHT), rule, "p0", "p1")
    after = assign_next(tree(EIGHT), rule, {"p0": (0, 1, 3), "p1": (0, 1, 2, 3)}, before, may_promote=True)
    assert isinstance(after, Assignment)
    assert (after.slots[0], after.world_size) == (Slot("p0", (0, 1, 3)), 7)


def test_a_single_lost_rank_is_taken_by_a_spare_worker() -> None:
    rule = rules(2, 4, minimum_ranks_per_pod=3)
    before = first(tree(EIGHT), rule, "p0", "p1")
    ready = {"p0": (0, 1, 3), "p1": (0, 1, 2, 3), "p2": (0, 2, 3)}
    after = assign_next(tree(EIGHT), rule, ready, before, may_promote=True)
    assert isinstance(after, Assignment)
    assert after.slots[:3] == (Slot("p0", (0, 1)), Slot("p2", (2,)), Slot("p0", (3,)))
    assert after.world_size == 8


PODS = [f"p{n}" for n in range(10)]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Rules, Topology, list[dict[str, tuple[int, ...]]]]:
    size = draw(st.integers(1, 4))
    rule = Rules(
        replicas=draw(st.integers(1, 8)),
        minimum_replicas=1,
        ranks_per_pod=size,
        minimum_ranks_per_pod=draw(st.integers(1, size)),
        max_ranks=draw(st.none() | st.integers(4, 20)),
        divisible_by=draw(st.integers(1, 4)),
        layers=(Layer("rack", "rack", max_ranks=draw(st.none() | st.integers(size, 12))), Layer("nvlink", "nvlink")),
    )
    topology = Topology(2)
    for pod in PODS:
        topology.place(pod, pod, [draw(st.sampled_from(["r1", "r2", ""])), draw(st.sampled_from(["a", "b"]))])
    place = st.sets(st.integers(0, size - 1)).map(lambda ranks: tuple(sorted(ranks)))
    ready = st.dictionaries(st.sampled_from(PODS), st.just(tuple(range(size))) | place)
    return rule, topology, draw(st.lists(ready, min_size=1, max_size=6))


def test_a_survivor_of_a_split_pod_counts_towards_its_domains_maximum() -> None:
    topology = Topology(1)
    for pod in ("p0", "p1", "p2"):
        topology.place(pod, pod, ["r1"])
    rule = Rules(2, 1, 2, 1, None, 1, (Layer("rack", "rack", max_ranks=2),))
    before = Assignment((Slot("p0", (0,)), Slot("p1", (0,))), 2)
    after = assign_next(topology, rule, {"p1": (0,), "p2": (0, 1)}, before, may_promote=True)
    assert isinstance(after, Assignment)
    assert after.world_size <= 2


@settings(max_examples=300, deadline=None)
@given(histories())
def test_every_assignment_is_valid(history: tuple[Rules, Topology, list[dict[str, tuple[int, ...]]]]) -> None:
    """Active ranks are 0..n-1, one ready worker each, within all limits, in local order where pods are whole."""
    rule, topology, steps = history
    line: Assignment | None = None
    for ready in steps:
        outcome = (
            assign_first(topology, rule, ready, set())
            if line is None
            else assign_next(topology, rule, ready, line, may_promote=True)
        )
        if isinstance(outcome, Shortage):
            continue
        places = {rank: (uid, local) for uid, ranks in outcome.ranks_by_pod().items() for local, rank in ranks.items()}
        assert sorted(places) == list(range(outcome.world_size))
        assert len(set(places.values())) == outcome.world_size
        assert all(local in ready[uid] for uid, local in places.values())
        assert outcome.world_size % rule.divisible_by == 0
        assert outcome.world_size <= min(rule.replicas * rule.ranks_per_pod, rule.max_ranks or 999)
        if not rule.may_split:
            assert all(rank % rule.ranks_per_pod == local for rank, (_uid, local) in places.items())
        limit = rule.layers[0].max_ranks
        racks = [topology.path(uid)[0] for uid, _local in places.values()]
        assert limit is None or all(racks.count(rack) <= limit for rack in set(racks))
        line = outcome


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(0, 8), st.data())
def test_survivors_keep_their_ranks_while_spares_suffice(replicas: int, num_spares: int, data: st.DataObject) -> None:
    pods = [f"p{n}" for n in range(replicas + num_spares)]
    topology, rule = Topology(2), rules(replicas)
    for pod in pods:
        topology.place(pod, pod, [data.draw(st.sampled_from(["r1", "r2"])), data.draw(st.sampled_from(["a", "b"]))])
    before = first(topology, rule, *pods)
    active = [slot.pod_uid for slot in before.slots]
    lost = data.draw(st.sets(st.sampled_from(active), max_size=min(num_spares, replicas)))
    after = assign_next(topology, rule, whole(*(pod for pod in pods if pod not in lost)), before, may_promote=True)
    assert isinstance(after, Assignment)
    assert len(after.promoted) == len(lost)
    for old, new in zip(before.slots, after.slots, strict=True):
        assert new == old if old.pod_uid not in lost else new.pod_uid in after.promoted


@pytest.mark.parametrize("num_lost", [1, 3])
def test_the_result_does_not_depend_on_the_order_of_the_ready_pods(num_lost: int) -> None:
    topology, rule = tree(EIGHT), rules(4)
    before = first(topology, rule, "p0", "p1", "p4", "p5")
    alive = [pod for pod in EIGHT if pod not in ("p0", "p1", "p4")[:num_lost]]
    outcomes = [assign_next(topology, rule, whole(*order), before, may_promote=True) for order in (alive, alive[::-1])]
    assert outcomes[0] == outcomes[1]
