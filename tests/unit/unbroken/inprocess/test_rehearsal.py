import datetime
import logging
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d_types
import torch.distributed as dist

from unbroken.inprocess.connections import sockets
from unbroken.inprocess.interruption import rehearsal
from unbroken.inprocess.interruption.rehearsal import rehearse


def fail(*_args: Any, **_options: Any) -> None:
    """What gloo does without a network interface, for example."""
    raise RuntimeError("no such interface")


def test_script_without_torch_distributed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed")
    assert rehearse() == []
    assert "torch.distributed" not in sys.modules


def test_group_that_cannot_be_made_is_no_fault_of_a_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", fail)
    assert rehearse() == []
    assert not dist.is_initialized()


def test_group_of_the_script_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", fail)
    assert rehearse() == []


def test_rehearsal_without_a_device_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither of its two ranks; what fails says so when it is needed."""
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", fail)
    assert len(rehearse()) == 1
    for thread in threading.enumerate():
        if thread.name == "unbroken-rehearsal":
            thread.join(30.0)
    assert "Traceback" not in "".join(capfd.readouterr())


def make_pair() -> list[Any]:
    """Return both ranks' groups of gloo, connected in this process."""
    store = c10d_types.HashStore()
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=30))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


def add_up(groups: list[Any]) -> list[float]:
    """Return what each rank has after an all_reduce of ones."""
    tensors = [torch.ones(1) for _ in groups]
    for work in [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    return [float(tensor) for tensor in tensors]


def test_rehearsal_ends_a_collective_as_an_abort_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R2: the first fault of a job costs no more than the next; the tables for C++ exceptions are read by then."""
    # On a busy machine the two ranks may take longer to meet than a worker would wait.
    monkeypatch.setattr(rehearsal, "_TIMEOUT", datetime.timedelta(seconds=60))
    caplog.set_level(logging.DEBUG, "unbroken.inprocess.interruption.rehearsal")
    left = rehearse()
    assert "rehearsed: error=" in caplog.text
    assert "no rehearsal" not in caplog.text
    assert len(left) == 3
    assert not dist.is_initialized()
    left.clear()
    assert sockets.gloo_connections() == []
    assert sockets._held == []


def test_groups_that_the_script_made_itself_outlive_the_rehearsal() -> None:
    groups = make_pair()
    before = sockets.gloo_connections()
    assert len(before) == 2
    rehearse().clear()
    assert sockets.gloo_connections() == before
    assert add_up(groups) == [2.0, 2.0]


def test_looking_for_epolls_finds_all_and_takes_nothing_off_them() -> None:
    reader, writer = os.pipe()
    with select.epoll() as first, select.epoll() as second:
        first.register(reader, select.EPOLLIN)
        second.register(reader, select.EPOLLIN)
        before = set(Path("/proc/self/fd").iterdir())
        assert {first.fileno(), second.fileno()} <= set(sockets._epolls())
        assert set(Path("/proc/self/fd").iterdir()) == before
        os.write(writer, b"x")
        assert [first.poll(0), second.poll(0)] == [[(reader, select.EPOLLIN)]] * 2
    os.close(reader)
    os.close(writer)
