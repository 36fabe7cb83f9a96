import sys
from typing import Any

import pytest
import torch.distributed as dist

from unbroken.inprocess.rehearsal import rehearse


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
