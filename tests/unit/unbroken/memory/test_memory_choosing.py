"""Which checkpoint is chosen: whole, of one moment, and of the newest timeline."""

from unbroken.memory.choosing import MAX_CANDIDATES, Candidate, Offer, candidates, with_later
from unbroken_core.pod.memory_slots import Moment


def offers(moment: Moment, ranks: range, world_size: int) -> list[Offer]:
    return [Offer(moment, rank, world_size) for rank in ranks]


OLD, NEW = Moment(1, 2, 50), Moment(1, 3, 20)


def test_a_checkpoint_without_one_rank_is_none() -> None:
    assert candidates(offers(NEW, range(3), 4)) == []


def test_the_same_step_of_two_iterations_is_never_mixed() -> None:
    again = Moment(1, 4, 20)
    assert candidates([*offers(NEW, range(2), 4), *offers(again, range(2, 4), 4)]) == []


def test_a_later_iteration_comes_before_a_later_step_of_an_earlier_one() -> None:
    found = candidates([*offers(OLD, range(4), 4), *offers(NEW, range(2), 2)])
    assert found == [Candidate(NEW, 2), Candidate(OLD, 4)]


def test_the_order_of_offers_and_who_repeats_them_do_not_matter() -> None:
    all_offers = [*offers(OLD, range(4), 4), *offers(NEW, range(4), 4)]
    assert candidates(all_offers) == candidates(list(reversed(all_offers)) * 3)


def test_absurd_ranks_count_for_nothing() -> None:
    assert candidates([Offer(NEW, 0, 2), Offer(NEW, -1, 2), Offer(NEW, 2, 2)]) == []


def test_candidates_are_bounded() -> None:
    many = [Offer(Moment(1, 1, step), 0, 1) for step in range(1000)]
    assert len(candidates(many)) == MAX_CANDIDATES


def test_what_was_saved_after_the_last_word_of_the_coordinator_comes_first() -> None:
    """It hears of a checkpoint only once it is digested. Of other iterations nothing is added: they may be over."""
    told = [Candidate(Moment(1, 3, 4), 2), Candidate(Moment(1, 3, 2), 2)]
    found = [Candidate(Moment(1, 4, 1), 2), Candidate(Moment(1, 3, 6), 2), Candidate(Moment(2, 3, 9), 2), told[0]]
    assert with_later(told, found) == [found[1], *told]


def test_a_step_that_was_given_up_is_not_taken_for_a_later_one() -> None:
    told = [Candidate(Moment(1, 3, 2), 2), Candidate(Moment(1, 3, 4), 2, is_given_up=True)]
    assert with_later(told, [Candidate(Moment(1, 3, 4), 2)]) == told


def test_where_the_plan_names_nothing_nothing_is_added() -> None:
    assert with_later([], [Candidate(Moment(1, 3, 4), 2)]) == []
