"""Which checkpoint a plan names: what is complete, what is lost, what is void, what is given up, what is refused."""

from dataclasses import replace

from unbroken_core.coordinator.memory.choosing import (
    MAX_FAILURES,
    ON_DISK,
    Attempts,
    Choice,
    Ended,
    Recall,
    SavedStep,
    decide_restore,
    memory_status,
    offers_of,
    recall,
)
from unbroken_core.coordinator.memory.table import MAX_STEPS_OF_PLACE, Checkpoints, ReportingPod, StepKey
from unbroken_core.protocol.bounds import MAX_NUMBER
from unbroken_core.vocabulary.checkpoints import MAX_CANDIDATES, MAX_FLOORS, Held, Holding, Load, LoadSource, is_void
from unbroken_core.vocabulary.reasons import Cause

SEATS = {0: "a", 1: "b"}
LIVING = {"a", "b", "c"}


def teller(uid: str, living: set[str] = LIVING, last_iteration: int = 9) -> ReportingPod:
    return ReportingPod(uid, f"pod-{uid}", last_iteration, 64, lambda other: other in living)


def holding(place: str, iteration: int, step: int, rank: int, data: str | None = None, world_size: int = 2) -> Holding:
    return Holding(place, 1, iteration, step, world_size, ((rank, "1a", f"d{rank}" if data is None else data),))


def tell(table: Checkpoints, uid: str, *holdings: Holding, loads: tuple[Load, ...] = (), arena: str = "") -> None:
    table.receive(teller(uid), Held(arena or f"0{uid}", holdings, loads))


def key(iteration: int, step: int, world_size: int = 2) -> StepKey:
    return StepKey(iteration, 1, step, world_size)


def two_steps() -> Checkpoints:
    """Return a table in which both pods hold steps 10 and 20 of iteration 0."""
    table = Checkpoints()
    table.begin(0, SEATS)
    for rank, uid in SEATS.items():
        tell(table, uid, holding(uid, 0, 10, rank), holding(uid, 0, 20, rank))
    return table


def test_a_step_is_complete_once_every_rank_has_verified_it() -> None:
    table = Checkpoints()
    tell(table, "a", holding("a", 0, 10, 0))
    tell(table, "b", holding("b", 0, 10, 1, data=""))
    assert table.newest_complete() is None
    assert [offer.key for offer in offers_of(table, SEATS)] == [key(0, 10)]
    tell(table, "b", holding("b", 0, 10, 1))
    assert table.newest_complete() == key(0, 10)


def test_a_step_of_which_a_rank_says_nothing_is_no_candidate() -> None:
    table = two_steps()
    tell(table, "a", holding("a", 0, 20, 0), holding("a", 0, 30, 0))
    assert decide_restore(offers_of(table, SEATS), Attempts()).keys == (key(0, 20),)


def test_the_loss_of_a_pod_leaves_nothing_and_says_whose_shards_went() -> None:
    table = two_steps()
    table.lose("b")
    choice = decide_restore(offers_of(table, {0: "a", 1: "c"}), Attempts())
    assert choice == Choice((), (), "step 20: 1 shard was lost with pod-b")


def test_the_loss_of_all_pods_is_still_told() -> None:
    table = two_steps()
    table.lose("a")
    table.lose("b")
    choice = decide_restore(offers_of(table, {0: "c", 1: "d"}), Attempts())
    assert choice == Choice((), (), "step 20: 2 shards were lost with pod-a, pod-b")


def test_memory_that_another_pod_of_the_host_reads_outlives_its_pod() -> None:
    table = Checkpoints()
    tell(table, "a", holding("a", 0, 10, 0), arena="aa")
    tell(table, "b", holding("b", 0, 10, 1), arena="aa")
    tell(table, "c", arena="aa")
    table.lose("b")
    seats = {0: "a", 1: "c"}
    assert decide_restore(offers_of(table, seats), Attempts()).keys == (key(0, 10),)
    assert table.sources(key(0, 10), "c", [1]) == [(1, "b")]
    assert table.sources(key(0, 10), "a", [0]) == []
    table.lose("a")
    table.lose("c")
    assert offers_of(table, {0: "d", 1: "d"})[0].losses == "2 shards were lost with pod-a, pod-b"


def test_a_shard_on_another_host_is_no_shard_for_who_needs_it() -> None:
    table = two_steps()
    (newest, _) = offers_of(table, {0: "b", 1: "a"})
    assert newest.losses == "2 shards were lost, or cannot be read from the pods that need them"


def test_a_smaller_world_needs_all_shards() -> None:
    table = two_steps()
    assert offers_of(table, {0: "a"})[0].losses
    near = Checkpoints()
    tell(near, "a", holding("a", 0, 10, 0), arena="aa")
    tell(near, "b", holding("b", 0, 10, 1), arena="aa")
    assert offers_of(near, {0: "a"}) == [SavedStep(key(0, 10))]


def test_replicas_protect_a_step_only_in_other_memory_and_another_domain() -> None:
    table = two_steps()
    assert not table.is_protected(key(0, 20), 1)
    table.begin(0, {})  # The ranks of replicas are another pod's.
    copies = {"a": 1, "b": 0}
    for uid, other in copies.items():
        own = holding(uid, 0, 20, 1 - other)
        table.receive(teller(uid), Held(f"0{uid}", (own, holding(uid, 0, 20, other))))
    table.assign({}, dict.fromkeys("ab", ("rack-1",)))
    assert not table.is_protected(key(0, 20), 1)
    table.assign({}, {"a": ("rack-1",), "b": ("rack-2",)})
    assert table.is_protected(key(0, 20), 1)
    assert not table.is_protected(key(0, 20), 2)


def load(iteration: int, of_iteration: int, step: int, source: LoadSource = LoadSource.MEMORY) -> Load:
    return Load(1, iteration, source, 1, of_iteration, step)


def test_what_is_newer_than_what_was_restored_is_void_on_every_holder() -> None:
    table = two_steps()
    table.begin(1, SEATS)
    restored = load(1, 0, 10)
    tell(table, "a", holding("a", 0, 10, 0), holding("a", 0, 20, 0), loads=(restored,))
    assert table.newest_complete() == key(0, 20), "one pod of two is no majority"
    tell(table, "b", holding("b", 0, 10, 1), loads=(restored,))
    assert table.newest_complete() == key(0, 10)
    # A pod that was away comes back with the dead timeline; a later world must not take it.
    tell(table, "c", holding("c", 0, 20, 0), holding("c", 0, 30, 0))
    assert key(0, 20) not in table.steps
    assert key(0, 30) not in table.steps


def test_an_ended_timeline_stays_void_after_a_second_restore() -> None:
    table = Checkpoints()
    table.begin(1, SEATS)
    for uid in SEATS.values():
        tell(table, uid, loads=(load(1, 0, 10),))
    table.begin(2, SEATS)
    for uid in SEATS.values():
        tell(table, uid, loads=(load(1, 0, 10), load(2, 1, 20)))
    assert table.is_void(key(0, 30))
    assert not table.is_void(key(0, 10))
    assert table.is_void(key(1, 30))
    assert not table.is_void(key(1, 20))
    assert not table.is_void(key(2, 21))


def test_a_checkpoint_that_was_restored_again_and_again_is_never_void() -> None:
    """Step 20 failed first, then step 10 more often than loads are remembered: it is all that there is."""
    floors = [load(1, 0, 20), *(load(number, 0, 10) for number in range(2, MAX_FLOORS + 1))]
    assert len(floors) == MAX_FLOORS
    assert not is_void(floors, *key(0, 10)[:3])
    assert is_void(floors, *key(0, 20)[:3])
    assert is_void(floors, *key(0, 9)[:3]), "what has ended before is not remembered"


def test_a_cut_off_world_that_goes_on_sealing_is_not_taken_once_another_has_loaded() -> None:
    table = two_steps()
    table.begin(1, {0: "c", 1: "d"})
    for uid in ("c", "d"):
        tell(table, uid, loads=(load(1, -1, -1, LoadSource.DISK),))
    for rank, uid in SEATS.items():
        tell(table, uid, holding(uid, 0, 90, rank))
    assert offers_of(table, SEATS) == []
    assert table.num_refused == 2


def test_one_pod_cannot_void_what_the_others_have() -> None:
    table = two_steps()
    table.begin(1, SEATS)
    tell(table, "a", loads=(load(1, -1, -1, LoadSource.NOTHING),))
    assert table.loads.floors == ()


def test_a_load_that_a_pod_tells_twice_is_one_vote_and_its_loss_breaks_nothing() -> None:
    """The fuzzer's find: such a message ended the coordinator with a KeyError when the pod went."""
    table = two_steps()
    told = load(2, 1, 10)
    tell(table, "a", loads=(told, told))
    assert table.loads.of(2) == told
    table.lose("a")
    assert table.loads.of(2) is None


def test_a_new_coordinator_learns_all_of_it_from_the_agents() -> None:
    table = Checkpoints()
    for rank, uid in SEATS.items():
        tell(table, uid, holding(uid, 1, 20, rank), loads=(load(1, 0, 10),))
    assert table.newest_complete() == key(1, 20)
    assert table.is_void(key(0, 30))


def test_pods_that_are_forgotten_and_tell_again_are_counted_once() -> None:
    table = two_steps()
    table.forget_pods()
    assert table.steps == {}
    tell(table, "a", holding("a", 0, 10, 0))
    tell(table, "a", holding("a", 0, 10, 0))
    assert table.steps[key(0, 10)].num_verified == 1


def fail(attempts: Attempts, times: int, cause: Cause = Cause.EXCEPTION, has_committed: bool = False) -> Attempts:
    for _time in range(times):
        attempts = attempts.note(key(0, 20), cause, has_committed)
    return attempts


OFFERS = [SavedStep(key(0, 10)), SavedStep(key(0, 20))]


def test_a_step_that_failed_twice_at_the_same_place_is_given_up_for_the_one_before() -> None:
    assert decide_restore(OFFERS, fail(Attempts(), 1)).keys == (key(0, 20), key(0, 10))
    choice = decide_restore(OFFERS, fail(Attempts(), 2))
    assert (choice.keys, choice.given_up) == ((key(0, 10),), (key(0, 20),))
    assert choice.reason.startswith("step 20 was restored twice and is given up: both times exception")


def test_other_causes_lost_pods_and_a_newer_step_give_nothing_up() -> None:
    assert fail(fail(Attempts(), 1), 1, Cause.PROCESS_SIGNAL).given_up == ()
    assert fail(Attempts(), 9, Cause.POD_LOST).given_up == ()
    assert fail(fail(fail(Attempts(), 1), 1, has_committed=True), 1).given_up == ()


def test_failures_are_bounded() -> None:
    attempts = Attempts()
    for step in range(1000):
        attempts = attempts.note(key(0, step), Cause.EXCEPTION, False).note(key(0, step), Cause.EXCEPTION, False)
    assert len(attempts.failures) == len(attempts.given_up) == MAX_FAILURES


def test_a_plan_names_few_steps_the_newest_first_and_one_that_was_given_up_last() -> None:
    offers = [SavedStep(key(0, step)) for step in range(30)]
    assert [one.step for one in decide_restore(offers, Attempts()).keys] == [29, 28, 27, 26][:MAX_CANDIDATES]
    attempts = Attempts(given_up=((key(0, 29), "bad"), (key(0, 27), "bad")))
    chosen, avoided = (key(0, 28), key(0, 26), key(0, 25)), (key(0, 29), key(0, 27))
    assert decide_restore(offers, attempts) == Choice(chosen, avoided[:1], "bad", avoided=avoided)


def test_a_plan_says_what_is_void_and_what_was_given_up_since_ranks_may_find_it() -> None:
    table = two_steps()
    told = replace(load(1, 0, 10), refused=((20, "x" * 500),))
    table.begin(1, SEATS)
    for uid in SEATS.values():
        tell(table, uid, loads=(told,))
    attempts = Attempts(given_up=((key(0, 9), "bad"),))
    choice = recall(table, Recall(attempts=attempts), Ended(1, None, -1), SEATS).choice
    assert choice is not None
    assert (choice.floors, choice.avoided) == ((load(1, 0, 10),), (key(0, 9),))


def test_two_failures_after_the_same_restore_change_the_next_plan() -> None:
    table, known = two_steps(), Recall()
    ended = Ended(0, Cause.EXCEPTION, 23)
    for iteration in (1, 2):
        known = recall(table, known, ended, SEATS)
        assert known.choice is not None
        assert known.choice.keys[0] == key(0, 20)
        table.begin(iteration, SEATS)
        loads = tuple(load(number, 0, 20) for number in range(1, iteration + 1))
        for rank, uid in SEATS.items():
            tell(table, uid, holding(uid, 0, 10, rank), holding(uid, 0, 20, rank), loads=loads)
        ended = Ended(iteration, Cause.EXCEPTION, 23)
    status = memory_status(table, known, 2)
    assert (status.complete_step, status.restored_step, status.steps_redone) == (20, 20, 3)
    known = recall(table, known, ended, SEATS)
    assert known.choice is not None
    assert known.choice.keys == (key(0, 10),)


def test_a_step_of_the_disk_is_given_up_as_one_in_memory() -> None:
    table, known = Checkpoints(), Recall()
    on_disk = StepKey(3, 2, 20, ON_DISK)
    ended = Ended(0, Cause.POD_LOST, 23)
    for iteration in (1, 2, 3):
        known = recall(table, known, ended, SEATS)
        assert known.choice in (None, Choice(floors=known.choice.floors if known.choice else ()))
        table.begin(iteration, SEATS)
        for uid in SEATS.values():
            tell(table, uid, loads=(Load(1, iteration, LoadSource.DISK, 2, 3, 20),))
        ended = Ended(iteration, Cause.EXCEPTION if iteration > 1 else Cause.POD_LOST, 23)
    known = recall(table, known, ended, SEATS)
    assert known.choice is not None
    assert known.choice.avoided == (on_disk,)
    assert known.choice.reason.startswith("step 20 was restored twice and is given up: both times exception")
    assert decide_restore(OFFERS, known.attempts).reason == "", "what is newer in memory needs no excuse"


def test_without_the_word_of_every_pod_ranks_find_out_among_themselves() -> None:
    table = two_steps()
    recalled = recall(table, Recall(), Ended(0, None, -1), {0: "a", 1: "silent"})
    assert recalled.choice is None
    tell(table, "a", loads=(load(1, 0, 10),))
    assert "not all agents tell" in memory_status(table, recalled, 1).reason


def test_a_later_step_that_ranks_have_found_themselves_leaves_nothing_to_be_explained() -> None:
    table = two_steps()
    table.begin(1, SEATS)
    recalled = Recall(Choice((key(0, 10),), (key(0, 8),), "step 20: 1 shard was lost"))
    expected = {10: "step 20: 1 shard was lost", 8: "step 20: 1 shard was lost", 30: ""}
    for step, reason in expected.items():
        tell(table, "a", loads=(load(1, 0, step),))
        tell(table, "b", loads=(load(1, 0, step),))
        assert memory_status(table, recalled, 1).reason == reason


def test_a_shard_that_could_not_be_read_is_told_with_its_pod() -> None:
    table = two_steps()
    table.begin(1, SEATS)
    told = replace(load(1, 0, 10), refused=((20, "3 of 8 blocks differ from what was sealed"),))
    tell(table, "b", loads=(told,))
    status = memory_status(table, Recall(Choice()), 1)
    assert status.reason == "step 20 could not be read by pod-b: 3 of 8 blocks differ from what was sealed"
    assert table.loads.num_known == 2


def test_what_an_ended_pod_has_left_may_be_all_there_is() -> None:
    table = Checkpoints()
    left = (holding("gone", 0, 10, 0, world_size=1), holding("gone", 0, 20, 0, world_size=1))
    for _time in range(2):
        tell(table, "a", *left, arena="aa")
        assert table.newest_complete() == key(0, 20, world_size=1)


def test_a_step_that_is_gone_by_now_has_no_sources() -> None:
    assert two_steps().sources(key(5, 5), "a", [0]) == []


# ----------------------------------------------------------------------------------------------------------- abuse


def test_the_shards_of_another_rank_or_pod_are_refused_and_counted() -> None:
    table = two_steps()
    tell(table, "a", holding("a", 0, 30, 1), holding("b", 0, 30, 1))
    tell(table, "b", holding("b", 0, 30, 1))
    assert table.num_refused == 2
    assert table.steps[key(0, 30)].holders.keys() == {1}


def test_another_digest_for_a_shard_that_somebody_has_verified_is_refused() -> None:
    table = Checkpoints()
    tell(table, "a", holding("a", 0, 10, 0, data="d1"))
    tell(table, "b", holding("b", 0, 10, 0, data="d2"), holding("b", 0, 10, 1))
    assert (table.num_refused, list(table.steps[key(0, 10)].holders[0])) == (1, ["a"])


def test_absurd_numbers_are_refused_and_a_flood_of_steps_is_cut() -> None:
    table = two_steps()
    absurd = [
        holding("a", 10, 1, 0),
        holding("a", MAX_NUMBER, 1, 0),
        holding("a", -1, 1, 0),
        holding("a", 0, 1, 2),
        holding("a", 0, 1, -1),
        holding("a", 0, 1, 0, world_size=1000),
    ]
    tell(table, "a", *absurd)
    assert table.num_refused == len(absurd)
    flood = [holding("a", 0, MAX_NUMBER - step, 0) for step in range(10_000)]
    tell(table, "a", *flood)
    assert len(table.steps) == MAX_STEPS_OF_PLACE + 2
    assert table.num_refused == len(absurd) + len(flood) - MAX_STEPS_OF_PLACE
    tell(table, "a", holding("a", 0, 10, 0), holding("a", 0, 20, 0))
    assert table.newest_complete() == key(0, 20)


def test_false_loads_are_refused_and_the_list_of_what_is_void_is_bounded() -> None:
    table = Checkpoints()
    tell(table, "a", loads=(load(10, 0, 1), load(1, 1, 5), load(1, 2, 5)))
    assert (table.loads.floors, table.num_refused) == ((), 3)
    for iteration in range(1, 1000):
        table.begin(iteration, {0: "a"})
        table.receive(teller("a", last_iteration=1000), Held("aa", (), (load(iteration, iteration - 1, 5),)))
    assert len(table.loads.floors) == MAX_FLOORS


def test_what_lost_pods_have_left_is_forgotten_once_a_newer_step_is_complete() -> None:
    table = Checkpoints()
    for number in range(100):
        uid = f"gone-{number}"
        table.receive(teller(uid, living=set()), Held("aa", (holding(uid, 0, number, 0, world_size=1),)))
        tell(table, "a", arena="aa")
        table.lose(uid)
    assert len(table.steps) == 1


def test_workers_that_remember_say_how_many_steps_are_redone_and_without_them_it_is_at_least_so_many() -> None:
    """Seen before: 1 step redone, of 3: the reports of the steps had come behind the fault."""
    table = two_steps()
    known = recall(table, Recall(), Ended(0, Cause.POD_LOST, 21), SEATS)
    table.begin(1, SEATS)
    restored = load(1, 0, 20)
    tell(table, "a", holding("a", 0, 20, 0), loads=(restored,))
    status = memory_status(table, known, 1)
    assert (status.steps_redone, status.is_redone_least) == (1, True), "all workers that have told are new ones"
    before = table.loads.num_known
    for uid, reached in (("a", 22), ("b", 23), ("c", -1)):
        tell(table, uid, loads=(replace(restored, reached=reached),))
    assert table.loads.num_known > before, "the status has changed"
    assert len({*table.loads.floors}) == 1, "what they remember makes no other load of it"
    for recalled in (known, Recall()):
        # A rendezvous that was started again knows no plan, and hears of the loads.
        status = memory_status(table, recalled, 1)
        assert (status.steps_redone, status.is_redone_least, status.reason) == (3, False, "")


def test_a_first_start_redoes_nothing_and_what_nobody_knows_is_not_said_to_be_nothing() -> None:
    table = Checkpoints()
    tell(table, "a", loads=(Load(1, 0, LoadSource.DISK, 0, -1, 20), load(1, 0, 10)))
    first, later = memory_status(table, Recall(), 0), memory_status(table, Recall(), 1)
    assert (first.steps_redone, first.is_redone_least) == (0, False)
    assert (later.steps_redone, later.is_redone_least) == (0, True)


def test_a_pod_with_ranks_in_which_checkpoints_have_no_room_is_told_with_why() -> None:
    """Nothing is saved for as long as it lasts, and the status said only `no step is on all ranks yet`."""
    table = Checkpoints()
    table.begin(0, SEATS)
    for uid in ("c", "b"):
        table.receive(teller(uid), Held(f"0{uid}", no_room="its limit is 1"))
    assert memory_status(table, Recall(), 0).reason == "pod-b: its limit is 1"
    assert memory_status(table, Recall(), 1).reason == "", "nobody is known to have ranks in it"
    assert memory_status(table, Recall(Choice(reason="step 10 was lost")), 0).reason == "step 10 was lost"
    tell(table, "b")
    assert memory_status(table, Recall(), 0).reason == ""
