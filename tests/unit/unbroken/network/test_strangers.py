"""Who may stay among connections without a token, on a clock of its own."""

from hypothesis import given
from hypothesis import strategies as st

from unbroken.network.strangers import YOUNG_S, Strangers

LIMIT = 8


def test_newcomers_push_out_the_oldest_of_the_address_that_holds_most() -> None:
    strangers: Strangers[str] = Strangers(LIMIT)
    for number in range(LIMIT):
        assert strangers.add(f"flood-{number}", "10.0.0.66", 0.0) is None
    assert strangers.add("agent-0", "10.0.0.1", 0.0) == "flood-0"
    assert strangers.add("agent-1", "10.0.0.2", 0.0) == "flood-1"
    assert strangers.add("flood-8", "10.0.0.66", 0.5) == "flood-8"
    assert strangers.add("flood-9", "10.0.0.66", YOUNG_S) == "flood-2"
    assert len(strangers) == LIMIT


def test_a_rush_of_agents_never_ends_those_that_have_just_come() -> None:
    strangers: Strangers[str] = Strangers(LIMIT)
    for number in range(LIMIT):
        strangers.add(f"agent-{number}", f"10.0.0.{number}", 0.0)
    assert strangers.add("agent-8", "10.0.0.8", 0.9) == "agent-8"
    strangers.remove("agent-3")
    assert strangers.add("agent-9", "10.0.0.9", 0.9) is None
    assert strangers.add("agent-8", "10.0.0.8", YOUNG_S) == "agent-0"


def test_nobody_is_left_to_go() -> None:
    strangers: Strangers[str] = Strangers(0)
    assert strangers.oldest() is None
    assert strangers.add("agent", "10.0.0.1", 0.0) == "agent"
    strangers.remove("agent")
    assert len(strangers) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.floats(0, 0.7)), max_size=200))
def test_their_number_is_bounded_and_a_lone_connection_outlives_any_flood(
    moves: list[tuple[int, bool, float]],
) -> None:
    """As long as another address holds more than one."""
    strangers: Strangers[int] = Strangers(LIMIT)
    now_s = 0.0
    address_by_key: dict[int, str] = {}
    for key, (address, is_end, pause_s) in enumerate(moves):
        now_s += pause_s
        if is_end and address_by_key:
            gone = sorted(address_by_key)[key % len(address_by_key)]
            strangers.remove(gone)
            del address_by_key[gone]
            continue
        counts = {name: list(address_by_key.values()).count(name) for name in address_by_key.values()}
        loser = strangers.add(key, f"10.0.0.{address}", now_s)
        address_by_key[key] = f"10.0.0.{address}"
        if loser is not None:
            lost = address_by_key.pop(loser)
            own = counts.get(f"10.0.0.{address}", 0)
            assert lost == f"10.0.0.{address}" or counts[lost] >= max(own, 1)
            assert counts.get(lost, 0) > 1 or max(counts.values()) == 1
        assert len(strangers) == len(address_by_key) <= LIMIT
