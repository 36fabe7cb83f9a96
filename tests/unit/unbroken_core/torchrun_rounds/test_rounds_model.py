"""Whatever happens to nodes, connections and the rendezvous, in whatever order: what always holds of rounds."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import example, given, settings
from tests.unit.unbroken_core.torchrun_rounds.rounds_fleet import LIMITS, Fleet, Member

from unbroken_core.torchrun_rounds.forming import RoundCandidate, order_ranks
from unbroken_core.torchrun_rounds.messages import Departure, Intent

NAMES = "abcdef"
_STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["add", "fail", "kill", "cut", "return", "give up", "go", "slow", "stuck"]),
            st.sampled_from(NAMES),
        ),
        st.tuples(st.just("pass_time"), st.sampled_from([0.5, 3.0, 20.0, 45.0, 100.0])),
        st.tuples(st.just("restart"), st.just("")),
    ),
    max_size=40,
)


def _do(fleet: Fleet, what: str, name: str) -> None:
    """Let one thing happen, if it can."""
    member = fleet.members.get(name)
    if what == "add":
        if member is None:
            fleet.add(name)
        return
    if member is None or member.is_dead or member.rejected or member.report.intent is Intent.LEAVE:
        return
    if what == "kill":
        fleet.kill(name)
    elif what == "cut":
        fleet.disconnect(name)
    elif what == "return" and member.session is None:
        fleet.connect(name)
    elif what in ("slow", "stuck"):
        _toggle(member, what)
    elif what == "fail" and member.report.intent is Intent.RUN:
        fleet.join(name)
    elif what in ("give up", "go"):
        fleet.leave(name, Departure.FAILED if what == "give up" else Departure.GONE)
        member.is_dead = True
        fleet.disconnect(name)


def _toggle(member: Member, what: str) -> None:
    if what == "slow":
        member.is_obedient = not member.is_obedient
    else:
        # The round that starts next does not come to run, and whatever comes next meets it there.
        member.can_open = member.can_connect = not member.can_open


def _check(fleet: Fleet) -> None:
    """Look at what holds at every moment."""
    for number, ranks in fleet.begun.items():
        assert len(ranks) <= fleet.limits.max_nodes, f"round {number} has {len(ranks)} nodes"
    newest = max(fleet.begun, default=-1)
    for name, member in fleet.members.items():
        is_told = member.session is not None and not member.is_dead and member.standing is not None
        if is_told and 0 <= member.running < newest:
            assert member.standing is not None
            assert member.standing.num_waiting, f"{name} stays in round {member.running}, the newest is {newest}"


@settings(max_examples=300)
@example(steps=[("add", "a"), ("stuck", "a"), ("pass_time", 100.0)], minimum=1, room=1)
@given(steps=_STEPS, minimum=st.integers(1, 3), room=st.integers(0, 2))
def test_all_nodes_that_live_are_in_one_round_again_once_nothing_happens_any_more(
    steps: list[tuple[str, str | float]], minimum: int, room: int
) -> None:
    fleet = Fleet(replace(LIMITS, min_nodes=minimum, max_nodes=minimum + room))
    for what, value in steps:
        if what == "pass_time":
            fleet.pass_time(float(value))
        elif what == "restart":
            fleet.restart_rendezvous()
        else:
            _do(fleet, what, str(value))
        _check(fleet)
    # From here on there are no faults: whoever lives comes back, and does as it is told.
    for name, member in fleet.members.items():
        member.is_obedient = member.can_open = member.can_connect = True
        # A node that was turned out has ended with an error.
        if member.session is None and not member.is_dead and not member.rejected:
            fleet.connect(name)
    fleet.pass_time(600.0)
    _check(fleet)
    alive = fleet.where(lambda member: member.report.intent is not Intent.LEAVE and not member.rejected)
    closed = {name for name in alive if fleet.end_of(name).value != "no"}
    if closed:
        # Some gave up when the others were too few: that ends it for all.
        assert not fleet.runners()
        return
    wanted = min(len(alive), fleet.limits.max_nodes) if len(alive) >= minimum else 0
    assert len(fleet.runners()) == wanted, (alive, fleet.begun, fleet.members)


@given(
    old=st.lists(st.integers(0, 20), unique=True, max_size=8),
    new=st.integers(0, 8),
    max_nodes=st.integers(1, 12),
)
def test_ranks_change_as_little_as_they_can(old: list[int], new: int, max_nodes: int) -> None:
    nodes = [RoundCandidate(f"old-{rank}", f"old-{rank}", (), 0.0, rank, True) for rank in old]
    nodes += [RoundCandidate(f"new-{number}", f"new-{number}", (), 1.0 + number, None, True) for number in range(new)]
    ranks = order_ranks(nodes, max_nodes)
    assert len(ranks) == len(set(ranks)) == min(len(nodes), max_nodes)
    kept = [uid for uid in ranks if uid.startswith("old-")]
    assert kept == [f"old-{rank}" for rank in sorted(old)][:max_nodes]
    if new >= 21 - len(old):
        assert all(ranks[rank] == f"old-{rank}" for rank in old if rank < len(ranks))


@given(st.lists(st.tuples(st.sampled_from("xy"), st.sampled_from("pq")), max_size=10))
def test_nodes_of_a_domain_are_neighbours_on_every_level(domains: list[tuple[str, str]]) -> None:
    nodes = [RoundCandidate(str(n), f"n{n}", pair, float(n), None, True) for n, pair in enumerate(domains)]
    ranks = [domains[int(uid)] for uid in order_ranks(nodes, 100)]
    for level in (1, 2):
        runs = [
            pair[:level] for index, pair in enumerate(ranks) if index == 0 or ranks[index - 1][:level] != pair[:level]
        ]
        assert len(runs) == len(set(runs))
