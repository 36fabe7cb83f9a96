"""Groups of a device: what is done to NCCL's communicators, tried with doubles, since these tests have no device.

Real NCCL is tried in test_gpu.py, where there are GPUs.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d_types
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend `fake`, which is for any device
from torch.distributed import distributed_c10d as c10d

from unbroken.inprocess.abort import AbortTorchDistributed
from unbroken.inprocess.exception import TimeoutError as BoundedTimeoutError
from unbroken.inprocess.health_check import CudaHealthCheck
from unbroken.inprocess.state import FrozenState, Mode
from unbroken.inprocess.torch_state import deferred_destroyer, groups, leftovers
from unbroken.inprocess.torch_state.leftovers import Leftovers

LIMIT_S = 60.0
STATE = FrozenState(rank=3, world_size=4, active_rank=3, iteration=0, mode=Mode.ACTIVE)


class Backend:
    """A communicator, whose abort does what the test says."""

    def __init__(self, abort: Callable[[], object]) -> None:
        self.abort = abort
        self.wrapped_pg: Any = self


class Group:
    """A group with one such backend for two devices, as torch shows it."""

    def __init__(self, abort: Callable[[], object] = lambda: None, destroy: Callable[[], object] | None = None) -> None:
        self._device_types = [torch.device("cuda"), torch.device("xpu")]
        self._backend = Backend(abort)
        self._destroy = destroy

    def _get_backend(self, _: torch.device) -> Backend:
        return self._backend

    def __del__(self) -> None:
        if self._destroy is not None:
            self._destroy()


class OwnGroup:
    """A group of a class of the user's own, which has no backends."""

    _device_types = (torch.device("cuda"),)

    def _get_backend(self, device: torch.device) -> Backend:
        raise RuntimeError(f"no backend for {device}")


@pytest.fixture
def register() -> Iterator[Callable[[Any], None]]:
    """Put a double into torch's registry."""
    names: Any = c10d._world.pg_names

    def add(group: Any) -> None:
        names[group] = f"double-{len(names)}"

    yield add
    groups.take_groups()


def test_communicators_are_aborted_all_at_once(register: Callable[[Any], None]) -> None:
    """2.10: an abort may wait for the kernels of another communicator."""
    others = threading.Barrier(3)
    for _ in range(3):
        register(Group(abort=lambda: others.wait(LIMIT_S)))
    assert groups.abort_communicators(LIMIT_S)
    assert not others.broken


def test_abort_that_does_not_end_is_given_up_by_name(
    register: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """2.10: timeouts.hard then ends the process."""
    monkeypatch.delenv("MASTER_PORT", raising=False)
    end, done = threading.Event(), threading.Event()
    register(Group(abort=lambda: end.wait(LIMIT_S)))
    register(Group(abort=done.set))
    assert AbortTorchDistributed(timeout=timedelta(seconds=0.2))(STATE) is STATE
    assert "communicators not aborted in time: timeout=0.2s rank=3" in caplog.text
    # Begun as well: whether it has come so far in that time is the machine's affair.
    assert done.wait(LIMIT_S)
    end.set()


def test_abort_that_fails_hinders_no_other(register: Callable[[Any], None], caplog: pytest.LogCaptureFixture) -> None:
    """2.20"""

    def fail() -> None:
        raise RuntimeError("unhandled system error")

    done = threading.Event()
    register(Group(abort=fail))
    register(Group(abort=done.set))
    register(OwnGroup())
    assert groups.abort_communicators(LIMIT_S)
    assert done.is_set()
    assert not groups.holds_device(OwnGroup())
    assert "communicator not aborted: error=unhandled system error" in caplog.text


def test_backend_of_a_device_is_found_beside_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.10: with real groups of torch's, of which one has a backend for a device that does nothing."""
    aborted: list[Any] = []
    monkeypatch.setattr(groups, "_abort_backend", aborted.append)
    dist.init_process_group("cpu:gloo,cuda:fake", store=c10d_types.HashStore(), rank=0, world_size=1)
    dist.new_group(backend="gloo")
    found = [groups.holds_device(group) for group in groups.current_groups()]
    assert groups.abort_communicators(LIMIT_S)
    assert [type(backend).__name__ for backend in aborted] == ["FakeProcessGroup"]
    assert sorted(found) == [False, True]
    aborted.clear()
    groups.take_groups()
    assert not dist.is_initialized()


def test_backend_is_aborted_behind_the_wrapper_for_debugging(register: Callable[[Any], None]) -> None:
    """2.10: TORCH_DISTRIBUTED_DEBUG=DETAIL puts one around gloo's, too, which is no device's for that."""
    aborted = threading.Event()
    group = Group(abort=lambda: pytest.fail("the wrapper's own abort was called"))
    group._backend.wrapped_pg = Backend(aborted.set)
    register(group)
    before = c10d_types.get_debug_level()
    c10d_types.set_debug_level(c10d_types.DebugLevel.DETAIL)
    try:
        dist.init_process_group("gloo", store=c10d_types.HashStore(), rank=0, world_size=1)
        assert [type(one).__name__ for one in groups.current_groups() if groups.holds_device(one)] == ["Group"]
        assert groups.abort_communicators(LIMIT_S)
    finally:
        c10d_types.set_debug_level(before)
    assert aborted.is_set()


def test_group_is_taken_without_an_orderly_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.14: torch's own waits for collectives that nobody will finish, and for a watchdog that sleeps for a minute."""
    shut: list[Any] = []
    dist.init_process_group("gloo", store=c10d_types.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist.ProcessGroup, "shutdown", lambda *group: shut.append(group))
    taken = groups.take_groups()
    assert len(taken) == 1
    assert not shut
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=c10d_types.HashStore(), rank=0, world_size=1)
    assert len(groups.take_groups()) == 1


def test_function_starts_when_the_groups_of_the_device_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.17: they hold the tensors of collectives that were aborted."""
    is_waited_for, gone = threading.Event(), threading.Event()
    join = threading.Thread.join

    def note_and_join(destruction: threading.Thread, timeout: float | None = None) -> None:
        if timeout:
            is_waited_for.set()
        join(destruction, timeout)

    def destroy() -> None:
        is_waited_for.wait(LIMIT_S)
        gone.set()

    monkeypatch.setattr(deferred_destroyer._Destruction, "join", note_and_join)
    monkeypatch.setattr(leftovers, "DEVICE_WAIT_S", LIMIT_S)
    left = Leftovers()
    left.keep([Group(destroy=destroy)])
    left.expect_garbage()
    left.collect()
    is_gone = gone.is_set()
    left.close()
    assert is_gone


def test_group_that_does_not_go_is_told_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """2.17: after an error of NCCL torch's watchdog sleeps, and the group's end waits for it."""
    monkeypatch.setattr(leftovers, "DEVICE_WAIT_S", 0.1)
    end = threading.Event()
    left = Leftovers()
    left.keep([Group(destroy=lambda: end.wait(LIMIT_S))])
    left.expect_garbage()
    left.collect()
    assert "old groups may still hold memory of their device: waited=0.1s" in caplog.text
    end.set()
    left.close()


class Device:
    """What CudaHealthCheck asks of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, synchronize: Callable[[], object]) -> None:
        self.synchronized: list[tuple[int, bool]] = []
        self.is_initialized = True
        self._synchronize = synchronize
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.is_initialized)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
        monkeypatch.setattr(torch.cuda, "synchronize", self._called)

    def _called(self, device: int) -> None:
        self.synchronized.append((device, threading.current_thread() is threading.main_thread()))
        self._synchronize()


def test_health_check_synchronises_the_device_twice_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.14"""
    device = Device(monkeypatch, lambda: None)
    assert CudaHealthCheck()(STATE) is STATE
    assert device.synchronized == [(5, False)] * 2


def test_health_check_leaves_a_device_alone_that_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.14: it would make a context, which takes hundreds of megabytes."""
    device = Device(monkeypatch, lambda: None)
    device.is_initialized = False
    assert CudaHealthCheck()(STATE) is STATE
    assert not device.synchronized


def test_health_check_raises_what_the_device_says_or_that_it_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """2.14"""
    caplog.set_level(logging.DEBUG)

    def fail() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    Device(monkeypatch, fail)
    with pytest.raises(RuntimeError, match="device-side assert"):
        CudaHealthCheck()(STATE)
    end = threading.Event()
    Device(monkeypatch, lambda: end.wait(LIMIT_S))
    with pytest.raises(BoundedTimeoutError, match=r"want device 5 to answer within 0\.1 s, it still runs"):
        CudaHealthCheck(timeout=timedelta(seconds=0.1))(STATE)
    end.set()
