"""Budgets of the rungs."""

from unbroken_core.protocol.settings import RungBudget
from unbroken_core.recovery.budgets import Budgets
from unbroken_core.vocabulary.reasons import Rung


def test_a_rung_that_is_not_listed_is_never_possible() -> None:
    assert not Budgets([RungBudget(Rung.POD)]).is_possible(Rung.JOB, 0.0)


def test_a_rung_without_limit_is_always_possible() -> None:
    ladder = Budgets([RungBudget(Rung.POD)])
    for second in range(1000):
        ladder.charge(Rung.POD, float(second))
    assert ladder.is_possible(Rung.POD, 1000.0)


def test_a_budget_is_used_up_and_comes_back_as_its_window_slides() -> None:
    ladder = Budgets([RungBudget(Rung.POD, 2, 10.0), RungBudget(Rung.JOB)])
    ladder.charge(Rung.POD, 0.0)
    ladder.charge(Rung.POD, 4.0)
    assert ladder.possible(9.9) == {Rung.JOB}
    assert ladder.spent(9.9) == ("pod (2 in 10 s)",)
    assert ladder.is_possible(Rung.POD, 10.0)
    ladder.charge(Rung.POD, 10.0)
    assert not ladder.is_possible(Rung.POD, 13.9)
    assert ladder.is_possible(Rung.POD, 14.0)


def test_a_limit_of_zero_forbids_a_rung() -> None:
    assert Budgets([RungBudget(Rung.POD, 0)]).possible(0.0) == frozenset()
