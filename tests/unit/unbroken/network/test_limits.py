"""What nobody may exceed, on a clock of its own."""

from unbroken.network.limits import (
    FAILURES_AT_ONCE,
    FAILURES_PER_S,
    FailureRate,
    TokenBucket,
)


def test_budget_lets_a_burst_pass_and_then_a_steady_rate() -> None:
    budget = TokenBucket(rate_per_s=4.0, burst=3.0, now_s=100.0)
    assert [budget.take(100.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.25, 0.5]
    assert budget.take(100.75) == 0.0
    assert [budget.take(1000.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.25]


def test_address_with_many_wrong_tokens_is_not_answered_for_a_while_and_no_other_one_suffers() -> None:
    rate = FailureRate()
    answered = [rate.may_answer("127.0.0.2", 5.0) for _ in range(100_000)]
    assert answered.count(True) == FAILURES_AT_ONCE
    assert rate.may_answer("127.0.0.3", 5.0)
    assert not rate.may_answer("127.0.0.2", 5.0)
    assert rate.may_answer("127.0.0.2", 5.0 + 1 / FAILURES_PER_S)


def test_flood_from_many_addresses_takes_no_more_memory_than_from_a_thousand() -> None:
    rate = FailureRate()
    for number in range(5000):
        assert rate.may_answer(f"10.{number >> 8}.{number & 255}.1", 5.0)
    assert len(rate._budgets) <= 1024
