"""Who is which active rank of a job: its tree, fed as the coordinator feeds it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken_core.ranks.ranking import Ranking, pod_order
from unbroken_core.ranks.rules import Rules
from unbroken_core.ranks.worlds import Cut, Outcome, Shortage, World
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import RankReason

LAYERS = (Layer("rack", "rack"), Layer("nvlink", "nvlink"))
EIGHT = {f"p{n}": f"r{n // 4}/n{n // 2}" for n in range(8)}
"""Two racks of two NVLink domains of two pods."""


def rules(replicas: int, ranks_per_pod: int = 2, **changes: Any) -> Rules:
    base = Rules(replicas, 1, ranks_per_pod, ranks_per_pod, None, 1, LAYERS)
    return replace(base, **changes)


class Job:
    """A ranking, and the ranks that its worlds have handed out."""

    def __init__(self, rule: Rules, pods: dict[str, str] | None = None) -> None:
        self.rules = rule
        self.ranking = Ranking(rule)
        self.ranks: dict[str, dict[int, int]] = {}
        self.cut: Cut | None = None
        for pod, domains in (pods or EIGHT).items():
            self.ranking.place(pod, pod, domains.split("/"))

    def have(self, *pods: str, **partly: Iterable[int]) -> None:
        """These pods, and no others, are healthy: whole ones, and some with these local ranks."""
        for pod in EIGHT:
            whole = range(self.rules.ranks_per_pod) if pod in pods else ()
            self.ranking.fit(pod, tuple(partly.get(pod, whole)))

    def first(self, *pods: str) -> World:
        """Hand out the first ranks, to these pods if possible."""
        world = self.ranking.first(set(pods))
        assert isinstance(world, World), world
        self.take()
        return world

    def then(self, may_promote: bool = True, may_grow: bool = True) -> Outcome:
        """Cut the next world, and take it if there is one."""
        outcome = self.ranking.following(may_promote=may_promote, may_grow=may_grow)
        if isinstance(outcome, World):
            self.take()
        return outcome

    def take(self) -> None:
        self.cut = self.ranking.take()
        if self.cut.is_first:
            self.ranks = {}
        self.ranks.update(self.cut.ranks)
        self.ranks = {pod: ranks for pod, ranks in self.ranks.items() if ranks}

    @property
    def line(self) -> list[str]:
        """Pods in the order of their ranks."""
        return sorted(self.ranks, key=lambda pod: min(self.ranks[pod].values()))

    @property
    def places(self) -> list[tuple[str, int]]:
        """Pod and local rank of each active rank."""
        held = {rank: (pod, local) for pod, ranks in self.ranks.items() for local, rank in ranks.items()}
        return [held[rank] for rank in sorted(held)]

    def why(self, pod: str) -> set[tuple[str, str]]:
        assert self.cut is not None
        return {(move.reason.value, move.origin) for move in self.cut.moves.get(pod, {}).values()}


def running(rule: Rules, *pods: str, healthy: Iterable[str] | None = None) -> Job:
    """Return a job that runs with these pods; all of EIGHT are healthy unless said."""
    job = Job(rule)
    job.have(*(EIGHT if healthy is None else healthy))
    job.first(*pods)
    return job


# ------------------------------------------------------------------------------------------------------- first worlds


def test_the_first_plan_follows_the_tree_not_the_order_of_arrival() -> None:
    job = Job(rules(4))
    job.have("p5", "p0", "p3", "p4")
    job.first()
    assert job.line == ["p0", "p3", "p4", "p5"]


def test_names_are_in_natural_order_and_unknown_domains_come_last() -> None:
    """3.38"""
    job = Job(rules(5), {"p10": "r2/b", "p2": "r10/b", "p3": "r2/b", "p4": "r2/a", "p1": "/"})
    for pod in ("p2", "p10", "p3", "p4", "p1"):
        job.ranking.fit(pod, (0, 1))
    job.first()
    assert job.line == ["p4", "p3", "p10", "p2", "p1"]
    assert job.ranking.ordered(["p1", "p2", "p10", "p3", "p4", "nobody"]) == job.line


def test_a_domain_that_is_called_unknown_is_not_the_unknown_one() -> None:
    job = Job(rules(2), {"p1": "", "p2": "unknown/unknown", "p3": "z/"})
    assert job.ranking.names("p1") == job.ranking.names("p2") == ("unknown", "unknown")
    assert (job.ranking.domains("p1"), job.ranking.domains("p2")) == (("", ""), ("unknown", "unknown"))
    assert job.ranking.ordered(["p1", "p2", "p3"]) == ["p2", "p3", "p1"]
    assert (job.ranking.names("nobody"), "nobody" in job.ranking) == ((), False)


def test_pods_of_one_name_are_told_apart_by_their_uid() -> None:
    assert pod_order("p#b") > pod_order("p#a")
    assert pod_order("p-10#a") > pod_order("p-2#b")
    assert pod_order("") > pod_order("zone")
    assert pod_order("a-01#x") != pod_order("a-1#x"), "names that differ are never one place"


def test_the_first_plan_prefers_pods_that_were_made_active() -> None:
    job = running(rules(2), "p1", "p2", healthy=("p0", "p1", "p2"))
    assert job.line == ["p1", "p2"]
    assert job.why("p1") == {("first", "")}
    assert job.why("p0") == set()


def test_a_divisor_that_leaves_nothing_is_a_shortage() -> None:
    job = Job(rules(2, divisible_by=4))
    job.have("p0")
    assert job.ranking.first(set()) == Shortage(1, 2, "2 healthy ranks, a multiple of 4 is wanted")


def test_a_job_without_pods_is_a_shortage() -> None:
    assert isinstance(Ranking(rules(1)).first(set()), Shortage)
    assert isinstance(Ranking(rules(1)).following(may_promote=True, may_grow=True), Shortage)


def test_a_world_that_was_not_asked_for_cannot_be_taken() -> None:
    job = running(rules(2))
    with pytest.raises(RuntimeError, match="want a world"):
        job.ranking.take()
    job.ranking.following(may_promote=True, may_grow=True)
    job.ranking.fit("p0", (0,))
    with pytest.raises(RuntimeError, match="want a world"):
        job.ranking.take()


# ------------------------------------------------------------------------------------------------------------- spares


def test_a_lost_pods_ranks_go_to_the_nearest_spare_in_local_order() -> None:
    """0.43"""
    job = running(rules(3), "p0", "p2", "p4")
    job.have("p0", "p4", "p7", "p6", "p3")
    assert job.then() == World(6, 3, num_left=1, promoted=("p3",))
    assert job.line == ["p0", "p3", "p4"]
    assert job.ranks["p3"] == {0: 2, 1: 3}
    assert job.why("p3") == {("replaced", "r0/n1/p2")}
    assert job.why("p2") == {("lost", "")}
    assert job.why("p0") == job.why("p4") == set()
    assert job.ranking.explanation() == [
        "Plan 1: 6 active, 4 spare, 6 lost ranks; 4 workers change their rank.",
        "r0/n1/p2: lost ranks 2-3.",
        "r0/n1/p3: takes ranks 2-3 of r0/n1/p2, both in r0/n1.",
    ]


def test_a_lost_domain_goes_to_a_whole_spare_domain() -> None:
    job = running(rules(4), "p0", "p1", "p4", "p5")
    # p2 is nearer to p0, but only p6 and p7 are a whole NVLink domain; p2's neighbour is not there.
    job.have("p4", "p5", "p2", "p6", "p7")
    job.then()
    assert job.line == ["p6", "p7", "p4", "p5"]


def test_a_lost_domain_without_a_whole_spare_domain_is_filled_pod_by_pod() -> None:
    job = running(rules(4), "p0", "p1", "p4", "p5")
    job.have("p4", "p5", "p2", "p6")
    job.then()
    assert job.line == ["p2", "p6", "p4", "p5"]


def test_when_all_spares_are_in_a_rack_that_dies_the_world_shrinks() -> None:
    job = running(rules(4), "p0", "p1", "p2", "p3")
    job.have("p0", "p1", "p2")
    assert job.then() == World(6, 3, num_closed=2, num_left=1)
    assert job.line == ["p0", "p1", "p2"]


def test_spares_are_left_alone_when_they_may_not_be_promoted() -> None:
    job = running(rules(2), "p0", "p1")
    job.have("p0", "p2")
    job.then(may_promote=False, may_grow=False)
    assert job.line == ["p0"]


def test_a_spare_that_could_not_be_promoted_is_appended_when_the_world_may_grow() -> None:
    """0.45: with the world rung as well as with the pod rung."""
    job = running(rules(2), "p0", "p1")
    job.have("p0", "p2")
    job.then(may_promote=False, may_grow=False)
    assert job.then(may_promote=False, may_grow=True) == World(4, 2, promoted=("p2",))
    assert (job.line, job.why("p2")) == (["p0", "p2"], {("returned", "")})


def test_a_layer_that_keeps_its_spares_does_not_lend_them_by_the_back_door() -> None:
    layers = (Layer("rack", "rack", replace_from=True), Layer("nvlink", "nvlink", replace_from=False))
    job = running(rules(2, layers=layers), "p0", "p2")
    job.have("p2", "p3", "p4")
    job.then()
    assert job.line == ["p2"], "p3 and p4 are in other NVLink domains than p0"
    job.have("p2", "p3", "p0")
    job.then()
    assert job.line == ["p2", "p0"], "who was active comes back"


def test_the_highest_ranks_of_a_domain_take_its_gaps_where_it_closes_them() -> None:
    layers = (Layer("rack", "rack"), Layer("nvlink", "nvlink", close_gaps=True))
    job = running(rules(8, layers=layers))
    job.have(*(pod for pod in EIGHT if pod != "p2"))
    job.then()
    assert job.line == ["p0", "p1", "p3", "p4", "p5", "p6", "p7"]
    assert job.why("p3") == {("filled-gap", "r0/n1/p2")}
    assert all(rank % 2 == local for ranks in job.ranks.values() for local, rank in ranks.items())


# ------------------------------------------------------------------------------------------------- fewer ranks, limits


def test_without_a_spare_those_behind_move_up() -> None:
    job = running(rules(3), healthy=("p0", "p1", "p2"))
    job.have("p0", "p2")
    assert job.then() == World(4, 2, num_closed=2, num_left=1)
    assert job.places == [("p0", 0), ("p0", 1), ("p2", 0), ("p2", 1)]
    assert job.why("p2") == {("shifted", "")}


def test_the_world_grows_back_from_the_healthy_count() -> None:
    """0.45: sizes are computed from all that is healthy, not from the last size."""
    job = running(rules(6, divisible_by=8), healthy=("p0", "p1", "p2", "p3", "p4", "p5"))
    sizes = []
    for alive in (("p0", "p1", "p2", "p3", "p5"), ("p0", "p2", "p3", "p5"), ("p0", "p2", "p3", "p5", "p6", "p7")):
        job.have(*alive)
        outcome = job.then()
        assert isinstance(outcome, World)
        sizes.append((outcome.world_size, outcome.num_pods))
    assert sizes == [(8, 5), (8, 4), (8, 6)]


def test_a_pod_that_a_limit_cut_off_takes_lost_ranks_so_that_survivors_keep_theirs() -> None:
    job = running(rules(3, max_ranks=4), healthy=("p0", "p1", "p2"))
    assert job.line == ["p0", "p1"]
    job.have("p1", "p2")
    job.then()
    assert job.line == ["p2", "p1"]


def test_a_pod_that_the_worlds_size_cut_in_two_is_whole_again_when_another_is_lost() -> None:
    """Its idle worker must not take a lost rank of another pod: local order would be gone."""
    job = running(rules(3, max_ranks=5), healthy=("p0", "p1", "p2"))
    assert job.ranks == {"p0": {0: 0, 1: 1}, "p1": {0: 2, 1: 3}, "p2": {0: 4}}
    job.have("p1", "p2")
    job.then()
    assert job.ranks == {"p1": {0: 0, 1: 1}, "p2": {0: 2, 1: 3}}


def test_a_pod_that_was_cut_in_two_is_replaced_as_a_whole() -> None:
    job = running(rules(3, max_ranks=5), "p0", "p1", "p2", healthy=("p0", "p1", "p2", "p3"))
    job.have("p0", "p1", "p3")
    job.then()
    assert job.ranks["p3"] == {0: 4}


def test_too_few_pods_are_a_shortage_with_numbers() -> None:
    job = running(rules(3, minimum_replicas=3), healthy=("p0", "p1", "p2"))
    job.have("p0", "p2")
    assert job.then() == Shortage(2, 4, "2 healthy pods of at least 3")
    job.have("p0", "p1", "p2")
    assert job.then() == World(6, 3), "after a shortage everybody has the rank that he had"


def test_spares_that_may_not_be_promoted_do_not_count_for_the_least_number_of_pods() -> None:
    job = running(rules(2, minimum_replicas=2), "p0", "p1")
    job.have("p0", "p2")
    assert job.then(may_promote=False, may_grow=False) == Shortage(1, 2, "1 healthy pod of at least 2")
    assert job.then() == World(4, 2, num_left=1, promoted=("p2",))


def test_a_domain_with_too_few_ranks_gives_up_all_of_them() -> None:
    """0.32, 0.33"""
    layers = (Layer("rack", "rack"), Layer("nvlink", "nvlink", min_ranks=4))
    job = running(rules(4, layers=layers), healthy=("p0", "p1", "p2", "p3"))
    job.have("p0", "p2", "p3")
    job.then()
    assert job.line == ["p2", "p3"]
    assert job.why("p0") == {("stepped-aside", "")}


def test_a_domain_never_holds_more_active_ranks_than_it_may() -> None:
    """0.29, 0.44: after replacements as well."""
    layers = (Layer("rack", "rack", max_ranks=5), Layer("nvlink", "nvlink"))
    job = running(rules(4, layers=layers), healthy=("p0", "p1", "p2", "p4", "p5"))
    assert job.line == ["p0", "p1", "p4", "p5"], "of 5 ranks a rack uses the 4 of whole pods"
    job.have("p0", "p1", "p2", "p3", "p5")
    job.then()
    assert job.line == ["p0", "p1", "p5"]


# -------------------------------------------------------------------------------------------------------- split pods


def test_a_split_pod_goes_on_with_the_workers_that_it_has() -> None:
    job = running(rules(2, 4, minimum_ranks_per_pod=3), healthy=("p0", "p1"))
    job.have("p1", p0=(0, 1, 3))
    outcome = job.then()
    assert isinstance(outcome, World)
    assert (outcome.world_size, outcome.num_pods) == (7, 2)
    assert job.places[:3] == [("p0", 0), ("p0", 1), ("p0", 3)]


def test_a_single_lost_rank_is_taken_by_a_spare_worker() -> None:
    job = running(rules(2, 4, minimum_ranks_per_pod=3), "p0", "p1", healthy=("p0", "p1", "p2"))
    job.have("p1", p0=(0, 1, 3), p2=(0, 2, 3))
    outcome = job.then()
    assert isinstance(outcome, World)
    assert (outcome.world_size, outcome.promoted) == (8, ("p2",))
    assert job.places[:4] == [("p0", 0), ("p0", 1), ("p2", 2), ("p0", 3)]


def test_the_least_number_of_split_pods_counts_pods_not_ranks() -> None:
    job = running(rules(2, 4, minimum_replicas=2, minimum_ranks_per_pod=1), healthy=("p0", "p1"))
    job.have("p1", p0=(0,))
    assert isinstance(job.then(), World)
    job.have("p1")
    assert job.then() == Shortage(1, 4, "1 healthy pod of at least 2")


# ----------------------------------------------------------------------------------------- pods come, move, go, return


def test_labels_that_change_are_taken_up_and_nobody_loses_a_rank_for_it() -> None:
    job = running(rules(2), "p0", "p2")
    job.ranking.place("p0", "p0", ["r1", "n2"])
    assert job.then() == World(4, 2)
    assert job.line == ["p0", "p2"]
    job.have("p2", "p3", "p5", "p4")
    job.then()
    assert job.line == ["p4", "p2"], "the nearest spare is sought from the new place"


def test_a_pod_that_moves_into_a_full_domain_gives_its_ranks_to_a_spare_elsewhere() -> None:
    layers = (Layer("rack", "rack", max_ranks=4), Layer("nvlink", "nvlink"))
    job = running(rules(3, layers=layers), "p0", "p1", "p4")
    job.ranking.place("p4", "p4", ["r0", "n1"])
    job.then()
    assert job.line == ["p0", "p1", "p5"]
    assert job.why("p4") == {("stepped-aside", "")}


def test_a_new_pod_is_a_spare_until_the_world_has_room() -> None:
    job = running(rules(3), healthy=("p0", "p1"))
    job.ranking.place("p8", "p8", ["r2", "n9"])
    job.ranking.fit("p8", (0, 1))
    assert job.then() == World(6, 3, promoted=("p8",))
    assert job.line == ["p0", "p1", "p8"]


def test_a_pod_that_is_forgotten_and_returns_before_the_plan_is_told_its_old_ranks() -> None:
    job = running(rules(2), healthy=("p0", "p1"))
    job.ranking.remove("p1")
    job.ranking.remove("nobody")
    job.ranks["p1"] = {}
    job.ranking.place("p1", "p1", ["r0", "n0"])
    job.ranking.fit("p1", (0, 1))
    assert job.then() == World(4, 2)
    assert job.ranks["p1"] == {0: 2, 1: 3}


def test_a_pod_that_returns_after_the_plan_is_a_new_one() -> None:
    job = running(rules(2), "p0", "p1")
    job.ranking.remove("p1")
    job.then()
    job.then()
    assert job.line == ["p0", "p2"]
    job.ranking.place("p1", "p1", ["r0", "n0"])
    job.have("p0", "p1")
    job.then()
    assert job.line == ["p0", "p1"]


def test_excluded_places_have_no_rank_and_are_spares_afterwards() -> None:
    job = running(rules(2), healthy=("p0", "p1"))
    job.ranking.exclude({"p1": {0}, "nobody": {1}})
    job.then()
    assert (job.line, job.ranking.has_rank("p1", 0)) == (["p0"], False)
    job.ranking.exclude({})
    assert job.ranking.num_spare_ranks == 2
    assert job.then() == World(4, 2, promoted=("p1",))


def test_asking_for_a_world_changes_nothing() -> None:
    job = running(rules(2), "p0", "p1")
    job.have("p0", "p2")
    for _turn in range(3):
        assert isinstance(job.ranking.following(may_promote=True, may_grow=True), World)
        assert isinstance(job.ranking.following(may_promote=False, may_grow=False), World)
    job.have(*EIGHT)
    assert job.then() == World(4, 2)
    assert job.cut is not None
    assert not job.cut.moves


def test_ranks_are_taken_over_and_those_of_lost_pods_go_to_spares() -> None:
    job = Job(rules(3))
    ranks = {0: ("p0", 0), 1: ("p0", 1), 4: ("p4", 0), 5: ("p4", 1)}
    assert job.ranking.adopt(6, ranks) == {"p0": {0: 0, 1: 1}, "lost-1": {0: 2, 1: 3}, "p4": {0: 4, 1: 5}}
    job.ranks = {"p0": {0: 0, 1: 1}, "p4": {0: 4, 1: 5}}
    job.have("p0", "p4", "p5")
    assert job.ranking.rank_0 == ("p0", 0)
    assert job.then() == World(6, 3, num_left=1, promoted=("p5",))
    assert job.ranks["p5"] == {0: 2, 1: 3}
    assert job.why("p5") == {("replaced", "unknown/unknown/lost-1")}


def test_a_rank_that_two_workers_claim_is_lost_where_one_worker_claims_two() -> None:
    job = Job(rules(1))
    job.have("p0", "p1")
    ranks = job.ranking.adopt(2, {0: ("p0", 0), 1: ("p0", 0)})
    assert ranks == {"p0": {0: 0}, "lost-0": {1: 1}}


# ------------------------------------------------------------------------------------------------------- properties


@st.composite
def histories(draw: st.DrawFn) -> tuple[Rules, dict[str, str], list[dict[str, tuple[int, ...]]]]:
    size = draw(st.integers(1, 4))
    minimum = draw(st.integers(1, size))
    rack_maximum = draw(st.none() | st.integers(size, 12))
    flags = st.booleans()
    rule = Rules(
        replicas=draw(st.integers(1, 8)),
        minimum_replicas=1,
        ranks_per_pod=size,
        minimum_ranks_per_pod=minimum,
        max_ranks=draw(st.none() | st.integers(4, 20)),
        divisible_by=draw(st.integers(1, 4)),
        layers=(
            Layer("rack", "rack", max_ranks=rack_maximum, replace_from=draw(flags), close_gaps=draw(flags)),
            Layer("nvlink", "nvlink", draw(st.integers(1, 5)), None, draw(flags), draw(flags)),
        ),
    )
    domains = st.tuples(st.sampled_from(["r1", "r2", ""]), st.sampled_from(["a", "b"])).map("/".join)
    pods = {pod: draw(domains) for pod in EIGHT}
    place = st.sets(st.integers(0, size - 1)).map(lambda ranks: tuple(sorted(ranks)))
    ready = st.dictionaries(st.sampled_from([*EIGHT]), st.just(tuple(range(size))) | place)
    return rule, pods, draw(st.lists(ready, min_size=1, max_size=6))


@settings(max_examples=400)
@given(histories(), st.data())
def test_every_world_is_valid(
    history: tuple[Rules, dict[str, str], list[dict[str, tuple[int, ...]]]], data: st.DataObject
) -> None:
    """Active ranks are 0..n-1, one ready worker each, within all limits, in local order where pods are whole.

    0.14, 0.29, 0.44: whatever is lost, comes back or moves between two worlds.
    """
    rule, pods, steps = history
    job = Job(rule, pods)
    is_first = True
    for ready in steps:
        if data.draw(st.booleans()):
            moved = data.draw(st.sampled_from([*EIGHT]))
            pods[moved] = data.draw(st.sampled_from(["r1/a", "r2/b", "/"]))
            job.ranking.place(moved, moved, pods[moved].split("/"))
        for pod in EIGHT:
            job.ranking.fit(pod, ready.get(pod, ()))
        may_promote, may_grow = data.draw(st.booleans()), data.draw(st.booleans())
        if is_first:
            outcome = job.ranking.first(set())
        else:
            outcome = job.ranking.following(may_promote=may_promote, may_grow=may_grow)
        if isinstance(outcome, Shortage):
            continue
        is_first = False
        job.take()
        assert sorted(rank for ranks in job.ranks.values() for rank in ranks.values()) == [*range(outcome.world_size)]
        assert all(local in ready.get(pod, ()) for pod, local in job.places)
        assert job.ranking.rank_0 == job.places[0]
        assert outcome.world_size % rule.divisible_by == 0
        assert outcome.world_size <= min(rule.replicas * rule.ranks_per_pod, rule.max_ranks or 999)
        if not rule.may_split:
            assert all(rank % rule.ranks_per_pod == local for rank, (_pod, local) in enumerate(job.places))
        limit = rule.layers[0].max_ranks
        racks = [pods[pod].split("/")[0] for pod, _local in job.places]
        assert limit is None or all(racks.count(rack) <= limit for rack in set(racks))


@settings(max_examples=200)
@given(st.integers(1, 8), st.integers(0, 8), st.data())
def test_survivors_keep_their_ranks_while_spares_suffice(replicas: int, num_spares: int, data: st.DataObject) -> None:
    place = st.tuples(st.sampled_from(["r1", "r2"]), st.sampled_from(["a", "b"])).map("/".join)
    pods = {f"p{n}": data.draw(place) for n in range(replicas + num_spares)}
    job = Job(rules(replicas), pods)
    for pod in pods:
        job.ranking.fit(pod, (0, 1))
    job.first()
    before = job.line
    lost = data.draw(st.sets(st.sampled_from(before), max_size=min(num_spares, replicas)))
    for pod in lost:
        job.ranking.remove(pod)
    outcome = job.then()
    assert isinstance(outcome, World)
    assert len(outcome.promoted) == len(lost)
    for old, new in zip(before, job.line, strict=True):
        assert new == old if old not in lost else new in outcome.promoted


@pytest.mark.parametrize("num_lost", [1, 3])
def test_the_result_does_not_depend_on_the_order_in_which_pods_come(num_lost: int) -> None:
    alive = [pod for pod in EIGHT if pod not in ("p0", "p1", "p4")[:num_lost]]
    found = []
    for order in (1, -1):
        job = Job(rules(4), dict([*EIGHT.items()][::order]))
        for pod in [*EIGHT][::order]:
            job.ranking.fit(pod, (0, 1))
        job.first("p0", "p1", "p4", "p5")
        for pod in [*EIGHT][::order]:
            job.ranking.fit(pod, (0, 1) if pod in alive else ())
        found.append((job.then(), job.ranks))
    assert found[0] == found[1]


def test_every_reason_of_a_move_is_a_word_of_the_vocabulary() -> None:
    job = running(rules(3), "p0", "p1", "p2", healthy=("p0", "p1", "p2"))
    job.have("p1", "p2", "p5")
    job.then()
    assert job.cut is not None
    words = {move.reason for moves in job.cut.moves.values() for move in moves.values()}
    assert words <= set(RankReason)
