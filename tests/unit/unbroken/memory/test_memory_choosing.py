"""Which checkpoint is chosen: whole, of one moment, and of the newest timeline."""

from unbroken.memory.choosing import MAX_CANDIDATES, ReadableCheckpoint, ReadableShard, candidates, with_later
from unbroken_core.pod.memory_slots import Moment
from unbroken_core.vocabulary.checkpoints import Candidate as Step
from unbroken_core.vocabulary.checkpoints import Key, Load, LoadSource, Restore


def offers(moment: Moment, ranks: range, world_size: int) -> list[ReadableShard]:
    return [ReadableShard(moment, rank, world_size) for rank in ranks]


OLD, NEW = Moment(1, 2, 50), Moment(1, 3, 20)


def test_a_checkpoint_without_one_rank_is_none() -> None:
    assert candidates(offers(NEW, range(3), 4)) == []


def test_the_same_step_of_two_iterations_is_never_mixed() -> None:
    again = Moment(1, 4, 20)
    assert candidates([*offers(NEW, range(2), 4), *offers(again, range(2, 4), 4)]) == []


def test_a_later_iteration_comes_before_a_later_step_of_an_earlier_one() -> None:
    found = candidates([*offers(OLD, range(4), 4), *offers(NEW, range(2), 2)])
    assert found == [ReadableCheckpoint(NEW, 2), ReadableCheckpoint(OLD, 4)]


def test_the_order_of_offers_and_who_repeats_them_do_not_matter() -> None:
    all_offers = [*offers(OLD, range(4), 4), *offers(NEW, range(4), 4)]
    assert candidates(all_offers) == candidates(list(reversed(all_offers)) * 3)


def test_absurd_ranks_count_for_nothing() -> None:
    assert candidates([ReadableShard(NEW, 0, 2), ReadableShard(NEW, -1, 2), ReadableShard(NEW, 2, 2)]) == []


def test_candidates_are_bounded() -> None:
    many = [ReadableShard(Moment(1, 1, step), 0, 1) for step in range(1000)]
    assert len(candidates(many)) == MAX_CANDIDATES


def plan(*steps: Step, floors: tuple[Load, ...] = (), given_up: tuple[Key, ...] = (), reason: str = "") -> Restore:
    return Restore(steps, reason, floors, given_up)


def test_what_was_saved_after_the_last_word_of_the_coordinator_comes_first() -> None:
    """It hears of a checkpoint only once its agent tells of it."""
    told = plan(Step(1, 3, 4, 2), Step(1, 3, 2, 2))
    found = [
        ReadableCheckpoint(Moment(1, 4, 1), 2),
        ReadableCheckpoint(Moment(1, 3, 6), 2),
        ReadableCheckpoint(Moment(1, 3, 3), 2),
    ]
    assert with_later(told, found) == [
        *found[:2],
        ReadableCheckpoint(Moment(1, 3, 4), 2),
        ReadableCheckpoint(Moment(1, 3, 2), 2),
    ]


def test_what_the_coordinator_lost_sight_of_is_no_reason_to_begin_anew() -> None:
    """Seen: of a lost pod it knew step 2 alone, which the others had overwritten; all of step 6 lay on the host."""
    told = plan(reason="step 2: 2 shards were lost, or cannot be read from the pods that need them")
    assert with_later(told, [ReadableCheckpoint(NEW, 2)]) == [ReadableCheckpoint(NEW, 2)]


def test_nothing_of_a_timeline_that_is_over_is_taken_wherever_it_is_found() -> None:
    told = plan(floors=(Load(2, 5, LoadSource.MEMORY, NEW.term, NEW.iteration, NEW.step),))
    void = [ReadableCheckpoint(Moment(1, 4, 1), 2), ReadableCheckpoint(Moment(1, 3, 21), 2)]
    assert with_later(told, [*void, ReadableCheckpoint(NEW, 2), ReadableCheckpoint(OLD, 2)]) == [
        ReadableCheckpoint(NEW, 2),
        ReadableCheckpoint(OLD, 2),
    ]


def test_a_step_that_was_given_up_is_not_taken_for_a_later_one() -> None:
    told = plan(Step(1, 3, 2, 2), Step(1, 3, 4, 2, is_given_up=True), given_up=((3, 1, 4, 2), (3, 1, 6, 2)))
    found = [ReadableCheckpoint(Moment(1, 3, 6), 2), ReadableCheckpoint(Moment(1, 3, 4), 2)]
    assert with_later(told, found) == [
        ReadableCheckpoint(Moment(1, 3, 2), 2),
        ReadableCheckpoint(Moment(1, 3, 4), 2, is_given_up=True),
    ]
