"""Copies of checkpoints on other pods: whose words count, who reads what from whom, what is protected."""

import pytest

from unbroken_core.coordinator.memory.choosing import Attempts, decide_restore, offers_of
from unbroken_core.coordinator.memory.claims import MAX_OWNERS
from unbroken_core.coordinator.memory.holders import Run, named_fetches
from unbroken_core.coordinator.memory.table import Checkpoints, ReportingPod, StepKey
from unbroken_core.protocol.bounds import MAX_NUMBER
from unbroken_core.vocabulary.checkpoints import (
    MAX_COPIES_TOLD,
    MAX_FETCHES,
    Copy,
    Held,
    Holding,
    Load,
    LoadSource,
    Peer,
)

PODS = "abcd"
SEATS = dict(enumerate(PODS))
BUDDY = {"a": "b", "b": "a", "c": "d", "d": "c"}
RACKS = {"a": ("r1",), "b": ("r2",), "c": ("r1",), "d": ("r2",), "e": ("r3",)}


def key(step: int, iteration: int = 0, world_size: int = 4) -> StepKey:
    return StepKey(iteration, 1, step, world_size)


def own(uid: str, *steps: int, data: str = "") -> tuple[Holding, ...]:
    rank = PODS.index(uid)
    return tuple(Holding(uid, 1, 0, step, 4, ((rank, "1a", data or f"{step}{rank}"),)) for step in steps)


def copy(owner: str, *steps: int, data: str = "") -> tuple[Copy, ...]:
    rank = PODS.index(owner)
    return tuple(Copy(owner, 1, 0, step, 4, ((rank, "1a", data or f"{step}{rank}"),)) for step in steps)


class Told:
    """A table, and which pods live."""

    def __init__(self, is_assigned: bool = True) -> None:
        self.table = Checkpoints()
        self.living = set("abcde")
        self.table.begin(0, SEATS)
        if is_assigned:
            self.table.assign({uid: [other] for uid, other in BUDDY.items()}, RACKS)

    def tell(
        self,
        uid: str,
        holdings: tuple[Holding, ...] = (),
        copies: tuple[Copy, ...] = (),
        port: int = 7,
        loads: tuple[Load, ...] = (),
    ) -> None:
        teller = ReportingPod(uid, f"pod-{uid}", 9, 64, lambda other: other in self.living)
        self.table.receive(teller, Held(f"0{uid}", holdings, loads, copies, "10.0.0.1" if port else "", port))

    def lose(self, *uids: str) -> None:
        for uid in uids:
            self.living.discard(uid)
            self.table.lose(uid)

    def keys(self, seats: dict[int, str]) -> tuple[StepKey, ...]:
        return decide_restore(offers_of(self.table, seats), Attempts()).keys


def all_copied(*steps: int, port: int = 7) -> Told:
    told = Told()
    for uid in PODS:
        told.tell(uid, own(uid, *steps), copy(BUDDY[uid], *steps), port)
    told.tell("e", port=port)
    return told


# -------------------------------------------------------------------------------------------------------- restoring


def test_a_spare_that_takes_over_reads_the_lost_rank_from_who_keeps_its_copy() -> None:
    told = all_copied(10, 20)
    told.lose("b")
    seats = {**SEATS, 1: "e"}
    assert told.keys(seats) == (key(20), key(10))
    assert told.table.fetches(key(20), "e", [1]) == ([(1, 1, 1, "a")], [])
    assert told.table.fetches(key(20), "a", [0]) == ([], []), "what a pod has itself it does not fetch"


def test_without_a_keeper_that_is_reached_a_copy_is_no_use() -> None:
    told = all_copied(10)
    told.tell("e", port=0)
    told.lose("b")
    assert told.keys({**SEATS, 1: "e"}) == ()
    assert told.keys({**SEATS, 1: "a", 0: "b"}) == ()


def test_owner_and_holder_lost_together_are_a_loss_with_its_reason() -> None:
    told = all_copied(10)
    told.lose("a", "b")
    choice = decide_restore(offers_of(told.table, {**SEATS, 0: "e", 1: "e"}), Attempts())
    assert (choice.keys, choice.reason) == ((), "step 10: 2 shards were lost with pod-b"), "the last one that had them"


def test_ranks_that_have_changed_places_fetch_from_each_other() -> None:
    told = all_copied(10)
    assert told.keys({0: "c", 1: "b", 2: "a", 3: "d"}) == (key(10),)
    assert told.table.fetches(key(10), "c", [0])[0] == [(0, 1, 0, "a")]
    assert told.table.fetches(key(10), "c", [0])[1] == [(0, 1, 0, "b")]


def test_a_pod_that_leaves_is_asked_last() -> None:
    """Its keeper may have ended by then, and whoever asks waits for one that may be starting again."""
    told = all_copied(10)
    assert told.table.fetches(key(10), "c", [0], {"a": None}) == ([(0, 1, 0, "b")], [(0, 1, 0, "a")])
    told.lose("b")
    assert told.table.fetches(key(10), "c", [0], {"a": None}) == ([(0, 1, 0, "a")], []), "there is no other one"


def test_a_smaller_world_reads_all_shards_of_the_old_one() -> None:
    told = all_copied(10)
    told.lose("b", "d")
    assert told.keys({0: "a", 1: "c"}) == (key(10),)
    first, others = told.table.fetches(key(10), "", range(4))
    assert first == [(0, 2, 0, "a"), (2, 2, 2, "c")]
    assert others == []


def test_shards_that_are_the_same_bit_by_bit_are_copies_of_each_other() -> None:
    told = Told()
    for uid in PODS:
        told.tell(uid, own(uid, 10, data="same"))
    assert told.table.is_protected(key(10), 1), "in two racks"
    assert not told.table.is_protected(key(10), 2), "in no third one"
    told.lose("b", "c", "d")
    told.tell("e")
    assert told.keys({0: "a", 1: "e", 2: "e", 3: "e"}) == (key(10),)
    assert told.table.fetches(key(10), "e", [1, 2, 3])[0] == [(1, 1, 0, "a"), (2, 1, 0, "a"), (3, 1, 0, "a")]


def test_more_pods_than_a_plan_names_are_a_loss_with_its_reason() -> None:
    table, size = Checkpoints(), MAX_FETCHES + 2
    for rank in range(size):
        uid = f"pod-{rank}"
        held = Held(uid, (Holding(uid, 1, 0, 1, size, ((rank, "1a", f"{rank}"),)),), (), (), "h", 7)
        table.receive(ReportingPod(uid, uid, 0, 1024, lambda _other: True), held)
    (offer,) = offers_of(table, {0: "pod-0"})
    assert offer.losses == f"1 of its shards lie with more pods than a plan names ({MAX_FETCHES})"


def test_a_plan_names_no_more_peers_than_an_environment_holds() -> None:
    runs: list[tuple[list[Run], list[Run]]] = [
        ([(rank, 1, rank, f"{part}-{rank}") for rank in range(MAX_FETCHES)], []) for part in range(4)
    ]
    peers = {run[3]: Peer(run[3], "h", 1) for first, _others in runs for run in first}
    fetches, named = named_fetches(runs, peers)
    assert [len(found) for found in fetches] == [MAX_FETCHES, 0, 0, 0]
    assert len(named) == MAX_FETCHES


# -------------------------------------------------------------------------------------------------------- protected


def test_a_step_is_protected_once_every_shard_has_enough_copies_in_other_domains() -> None:
    told = Told()
    for uid in PODS:
        told.tell(uid, own(uid, 10), copy(BUDDY[uid], 10) if uid != "d" else ())
    assert not told.table.is_protected(key(10), 1)
    told.tell("d", own("d", 10), copy("c", 10))
    assert told.table.is_protected(key(10), 1)
    assert not told.table.is_protected(key(10), 2)
    told.table.assign({}, dict.fromkeys(PODS, ("r1",)))
    assert not told.table.is_protected(key(10), 1), "all in one rack"


def test_a_pod_whose_rack_is_not_known_may_stand_in_any_and_protects_nothing() -> None:
    told = all_copied(10)
    assert told.table.is_protected(key(10), 1)
    told.table.assign({}, {pod: rack for pod, rack in RACKS.items() if pod != "b"})
    assert not told.table.is_protected(key(10), 1)


def test_homes_that_share_a_memory_or_a_rack_are_lost_together() -> None:
    """By the number of memories and of racks alone these would be three; two failures take all."""
    told = Told(is_assigned=False)
    homes = {"a": ("m1", "r1"), "b": ("m1", "r2"), "c": ("m1", "r3"), "d": ("m2", "r1"), "e": ("m3", "r1")}
    told.table.begin(0, {0: "a"})
    told.table.assign({uid: ["a"] for uid in "bcde"}, {uid: (rack,) for uid, (_memory, rack) in homes.items()})
    shards = ((0, "1a", "d"),)
    for uid, (memory, _rack) in homes.items():
        teller = ReportingPod(uid, f"pod-{uid}", 9, 64, lambda other: other in told.living)
        holdings = (Holding("a", 1, 0, 10, 1, shards),) if uid == "a" else ()
        copies = () if uid == "a" else (Copy("a", 1, 0, 10, 1, shards),)
        told.table.receive(teller, Held({"m1": "01", "m2": "02", "m3": "03"}[memory], holdings, (), copies, "h", 7))
    assert told.table.newest_complete() == key(10, world_size=1)
    assert not told.table.is_protected(key(10, world_size=1), 2)


def test_the_loss_of_a_pod_ends_the_protection_and_not_the_step() -> None:
    told = all_copied(10)
    told.lose("b")
    assert not told.table.is_protected(key(10), 1)
    assert told.table.newest_complete() == key(10)


# ------------------------------------------------------------------------------------------------------- who may speak


def test_copies_of_a_pod_that_nobody_asked_for_are_refused_and_counted() -> None:
    told = Told()
    told.tell("c", own("c", 10), copy("a", 10))
    assert told.table.num_refused == 1
    assert list(told.table.steps[key(10)].holders) == [2]


def test_a_pod_may_speak_for_those_whose_copies_it_kept_before() -> None:
    told = all_copied(10)
    told.table.assign({"a": ["c"]}, RACKS)
    told.tell("a", own("a", 10), copy("b", 10))
    assert told.table.num_refused == 0
    for number in range(2 * MAX_OWNERS):
        told.table.assign({"a": [f"other-{number}"]}, RACKS)
    told.tell("a", own("a", 10), copy("b", 10))
    assert told.table.num_refused == 1, "no more are remembered than a few"


def test_a_pod_that_was_away_when_copies_were_assigned_anew_may_say_what_others_said_of_the_dead() -> None:
    """Seen in the simulation: what it alone had left was refused, and the training began anew."""
    told = Told(is_assigned=False)
    told.lose("a")
    told.tell("b", own("b", 10), copy("a", 10))
    told.table.assign({"b": ["d"], "d": ["b"]}, RACKS)
    told.tell("e", copies=(*copy("a", 10, data="else"), *copy("a", 20), *copy("b", 10)))
    assert told.table.num_refused == 3, "other words, a step that nobody knows, and a pod that lives"
    told.tell("c", own("c", 10), copy("a", 10))
    assert told.table.num_refused == 3
    told.lose("b")
    assert list(told.table.steps[key(10)].holders[0]) == ["c"]


def test_a_new_coordinator_believes_copies_of_the_dead_and_what_another_holder_says_too() -> None:
    told = Told(is_assigned=False)
    told.lose("a")
    told.tell("b", own("b", 10), (*copy("a", 10), *copy("c", 10)))
    holders = told.table.steps[key(10)].holders
    assert list(holders) == [1, 0], "nothing speaks for the copy of a pod that lives"
    told.tell("c", own("c", 10))
    assert set(holders[2]) == {"b", "c"}, "its owner says the same: heard again"
    assert told.table.num_refused == 0


def test_a_copy_that_was_put_off_counts_once_its_owner_is_gone_or_it_is_asked_for() -> None:
    for is_lost in (True, False):
        told = Told(is_assigned=False)
        told.tell("c")
        told.tell("b", (), copy("c", 10))
        assert key(10) not in told.table.steps
        if is_lost:
            told.lose("c")
        else:
            told.table.assign({"b": ["c"]}, RACKS)
        assert set(told.table.steps[key(10)].holders[2]) == {"b"}


def test_a_copy_that_was_put_off_counts_once_an_owner_is_gone_that_never_said_what_it_has() -> None:
    """As one that is lost before its new agent knows of its keeper: it was only counted with the next report."""
    told = Told(is_assigned=False)
    told.tell("c", own("c", 10), copy("b", 10))
    assert 1 not in told.table.steps[key(10)].holders
    told.lose("b")
    assert list(told.table.steps[key(10)].holders[1]) == ["c"]


def test_a_new_coordinator_lets_no_pod_claim_more_once_it_has_told_pods_what_to_keep() -> None:
    told = Told()
    told.lose("d")
    told.tell("e", (), copy("d", 90))
    assert (told.table.steps, told.table.num_refused) == ({}, 1)


def test_the_owner_is_believed_before_those_who_say_that_they_have_copies() -> None:
    told = Told()
    told.tell("b", (), copy("a", 10, data="lie"))
    told.tell("a", own("a", 10, data="truth"))
    assert set(told.table.steps[key(10)].holders[0]) == {"a"}
    assert told.table.num_refused == 1
    told.tell("b", own("b", 10), copy("a", 10, data="lie"))
    assert set(told.table.steps[key(10)].holders[0]) == {"a"}
    told.lose("a")
    told.table.assign({"c": ["a"]}, RACKS)
    told.tell("c", (), copy("a", 10, data="lie"))
    assert 0 not in told.table.steps[key(10)].holders, "what the owner had verified stays known"


def test_a_liar_cannot_make_a_step_protected_or_complete_with_shards_of_others() -> None:
    told = Told()
    told.tell("a", own("a", 90), tuple(one for uid in "bcd" for one in copy(uid, 90)))
    assert told.table.newest_complete() is None
    assert told.keys(SEATS) == ()
    assert told.table.num_refused == 2, "c and d; b is its buddy"


@pytest.mark.parametrize(
    "false",
    [
        pytest.param(Copy("b", 1, 10, 1, 4, ((1, "1a", "x"),)), id="an iteration of the future"),
        pytest.param(Copy("b", 1, MAX_NUMBER, 1, 4, ((1, "1a", "x"),)), id="absurd"),
        pytest.param(Copy("b", 1, 0, 1, 4, ((2, "1a", "x"),)), id="another pod's rank"),
        pytest.param(Copy("b", 1, 0, 1, 4, ((4, "1a", "x"),)), id="no rank of that world"),
        pytest.param(Copy("b", 1, 0, 1, 4, ((1, "1a", ""),)), id="not compared"),
        pytest.param(Copy("b", 1, 0, 1, 1000, ((1, "1a", "x"),)), id="a world that is too large"),
        pytest.param(Copy("a", 1, 0, 1, 4, ((0, "1a", "x"),)), id="its own as a copy"),
    ],
)
def test_false_copies_are_refused_and_counted(false: Copy) -> None:
    told = Told()
    told.tell("a", (), (false,))
    assert (told.table.steps, told.table.num_refused) == ({}, 1)


def test_a_flood_of_copies_is_cut() -> None:
    told, number = Told(), 1_000_000
    flood = (*copy("b", *range(MAX_COPIES_TOLD)), *copy("b", 99) * (number - MAX_COPIES_TOLD))
    told.tell("a", (), flood)
    assert len(told.table.steps) == MAX_COPIES_TOLD
    assert told.table.num_refused == number - MAX_COPIES_TOLD


def test_what_is_void_is_void_as_a_copy_too_and_may_be_removed() -> None:
    told = all_copied(10, 20)
    told.table.begin(1, SEATS)
    restored = Load(1, 1, LoadSource.MEMORY, 1, 0, 10)
    for uid in PODS:
        told.tell(uid, own(uid, 10), copy(BUDDY[uid], 10), loads=(restored,))
    told.tell("a", own("a", 10), copy("b", 20))
    assert key(20) not in told.table.steps
    assert told.table.copied("a") == {"b": None}


def test_a_pod_that_shares_its_memory_leaves_its_shards_and_no_copies() -> None:
    told = Told()
    for uid in "ab":
        teller = ReportingPod(uid, f"pod-{uid}", 9, 64, lambda other: other in told.living)
        told.table.receive(teller, Held("aa", own(uid, 10), (), copy(BUDDY[uid], 10), "h", 7))
    told.lose("a")
    assert told.table.steps[key(10)].holders.keys() == {0, 1}
    assert set(told.table.steps[key(10)].holders[1]) == {"b"}
    assert not told.table.is_reached("a")
