"""What nobody may exceed, on a clock of its own."""

from unbroken.network.limits import (
    FAILURES_AT_ONCE,
    FAILURES_PER_S,
    TOKEN_TIMEOUT_S,
    Budget,
    FailureRate,
    UnauthenticatedConnections,
)
from unbroken.network.refusals import Refusal, Refusals


def test_budget_lets_a_burst_pass_and_then_a_steady_rate() -> None:
    budget = Budget(rate_per_s=4.0, burst=3.0, now_s=100.0)
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


class Line:
    """A connection that can be closed."""

    def __init__(self, name: str, open_lines: "list[Line]") -> None:
        self._name = name
        self._open = open_lines
        open_lines.append(self)

    def __repr__(self) -> str:
        return self._name

    def force_close(self) -> None:
        self._open.remove(self)


def test_connection_without_a_token_is_closed_in_time_and_one_with_it_stays() -> None:
    lines: list[Line] = []
    refusals = Refusals()
    strangers = UnauthenticatedConnections(lambda: list(lines), refusals, limit=10)
    member = Line("member", lines)
    Line("idle", lines)
    strangers.admit(member)
    strangers.sweep(0.0)
    late = Line("late", lines)
    strangers.sweep(TOKEN_TIMEOUT_S - 0.1)
    assert len(lines) == 3
    strangers.sweep(TOKEN_TIMEOUT_S)
    assert lines == [member, late]
    assert refusals.counts[Refusal.SILENT] == 1
    strangers.sweep(10 * TOKEN_TIMEOUT_S)
    assert lines == [member]


def test_of_too_many_connections_without_a_token_the_oldest_are_closed() -> None:
    lines: list[Line] = []
    refusals = Refusals()
    strangers = UnauthenticatedConnections(lambda: list(lines), refusals, limit=2)
    members = [Line("member", lines) for _ in range(5)]
    for member in members:
        strangers.admit(member)
    for number in range(4):
        Line(f"stranger {number}", lines)
        strangers.sweep(float(number))
    assert [repr(line) for line in lines[5:]] == ["stranger 2", "stranger 3"]
    assert refusals.counts[Refusal.TOO_MANY] == 2
