"""The extension's stores on a store of torch, and faults on purpose."""

import threading

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not export it by name

from unbroken.inprocess.state import Mode, State
from unbroken.nvrx import inject_fault
from unbroken.nvrx.inject_fault import Fault, InjectedException
from unbroken.nvrx.inprocess.store import PrefixStore

PATIENT_S = 60.0


def test_states_and_keys_go_from_rank_to_rank() -> None:
    store = PrefixStore(3, HashStore())
    sent = [State(rank, 2, mode=Mode.ACTIVE, fn_exception=OSError("stays here")) for rank in range(2)]
    for rank, state in enumerate(sent):
        store.send_state(state, rank)
        store.send_key(["host", rank], rank)
    found = store.get_states([1, 0])
    assert [(state.rank, state.mode, state.fn_exception) for state in found] == [
        (1, Mode.ACTIVE, None),
        (0, Mode.ACTIVE, None),
    ]
    assert store.get_keys(range(2)) == [["host", 0], ["host", 1]]
    assert store.critical_ranks == ()


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"send_state: want a State, such as ctx.state, got dict: {'rank': 3}"):
        PrefixStore(3, HashStore()).send_state({"rank": 3}, 0)  # type: ignore[arg-type] # what a script may do


def test_all_ranks_choose_the_same_ranks_and_spare_the_lowest(monkeypatch: pytest.MonkeyPatch) -> None:
    hit: dict[int, list[tuple[object, float]]] = {}
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(
            inject_fault,
            "dispatch_fault_injection",
            lambda fault, delay, _callback, rank=rank: hit.setdefault(rank, []).append((fault, delay)),
        )
        inject_fault.inject_fault((Fault.SIGKILL, Fault.SIGSTOP), (2, 5), 3, (1.0, 2.0), seed=7)
    assert 2 <= len(hit) <= 5
    assert min(hit) >= 3
    assert len({tuple(made) for made in hit.values()}) == 1


def test_fault_of_the_script_is_raised_where_it_asks_for_it() -> None:
    called = threading.Event()
    inject_fault.dispatch_fault_injection(Fault.WORKLOAD_EXC, 0.0, called.set)
    assert called.wait(PATIENT_S)
    assert inject_fault._due.wait(PATIENT_S)
    with pytest.raises(InjectedException):
        inject_fault.maybe_raise_workload_exception()
    inject_fault.maybe_raise_workload_exception()


def test_own_kind_of_fault_is_made_by_its_handler() -> None:
    made: list[tuple[float, object]] = []
    inject_fault.register_fault("BAD_WEATHER", lambda delay, callback: made.append((delay, callback)))
    inject_fault.dispatch_fault_injection("BAD_WEATHER", 1.5, None)
    assert made == [(1.5, None)]
    with pytest.raises(ValueError, match=r"want one of GPU_ERROR, .*, BAD_WEATHER, got 'SUNSHINE'"):
        inject_fault.dispatch_fault_injection("SUNSHINE", 0.0, None)


def test_asynchronous_exception_reaches_the_main_thread() -> None:
    never = threading.Event()
    with pytest.raises(InjectedException):
        # It may be raised before this call has returned.
        inject_fault.dispatch_fault_injection(Fault.ASYNC_EXC, 0.0, None)
        for _ in range(int(PATIENT_S / 0.01)):
            never.wait(0.01)
