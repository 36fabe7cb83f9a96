"""The extension's wrapper: what it takes, what it adds, and what it says."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from unbroken.inprocess.health_check import CudaHealthCheck, FaultCounter
from unbroken.inprocess.state import FrozenState
from unbroken.nvrx import inprocess
from unbroken.nvrx.inprocess import wrap

STATE = FrozenState(rank=3, world_size=4, initial_rank=0)


def names(check: object) -> list[str]:
    """Return the classes of the parts of a composition."""
    return [type(part).__name__ for part in getattr(check, "instances", ())]


CHAINED = ["ChainedGPUHealthCheck", "ChainedNVLHealthCheck", "ChainedNicHealthCheck"]


def test_restart_health_check_is_the_own_one_and_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    own = inprocess.Compose(CudaHealthCheck(), FaultCounter())
    wrapper: Any = inprocess.Wrapper(health_check=own)
    assert names(wrapper.restart_health_check) == ["CudaHealthCheck", "FaultCounter", *CHAINED]
    assert wrapper.health_check is own
    assert wrapper.options.health_check is own
    assert names(inprocess.Wrapper().restart_health_check) == CHAINED
    monkeypatch.setenv("LOCAL_RANK", "first")
    assert names(inprocess.Wrapper(health_check=CudaHealthCheck()).restart_health_check) == ["CudaHealthCheck"]
    monkeypatch.delenv("LOCAL_RANK")
    assert inprocess.Wrapper().restart_health_check is None


def test_lines_are_those_that_users_of_the_extension_look_for(caplog: pytest.LogCaptureFixture) -> None:
    wrapper: Any = inprocess.Wrapper()
    failed = FrozenState(rank=3, world_size=4, fn_exception=RuntimeError("x" * 5000))
    with caplog.at_level(logging.INFO, logger="nvrx"):
        wrapper.options.finalize(failed)
        wrapper.options.restart_health_check(STATE)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("rank=3 fn_ex: RuntimeError('xxx")
    assert len(lines[0]) < 2100
    assert lines[1:] == [
        "rank=3 term_ex: RankShouldRestart()",
        "rank=3 restart_ex: HealthCheckPassed() iteration=0",
    ]


def test_nested_restarter_speaks_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    completed = inprocess.nested_restarter.NestedRestarterHandlingCompleted()
    starting = inprocess.nested_restarter.NestedRestarterHandlingStarting()
    own = inprocess.nested_restarter.NestedRestarterCallback("resting", "deeply")
    for plugin in (completed, starting, completed, own, inprocess.nested_restarter.NestedRestarterFinalized()):
        assert plugin(STATE) is STATE
    inprocess.nested_restarter.NestedRestarterAborted(special_rank=1)(STATE)
    said = [line.partition("] [ALWAYS] ")[2] for line in capsys.readouterr().out.splitlines()]
    start = "[InprocessRestarter.Restarter] [NestedRestarter] name=[InProcess] state="
    assert said == [
        f"{start}initialize",
        f"{start}handling stage=starting",
        f"{start}handling stage=completed",
        f"{start}resting stage=deeply",
        f"{start}finalized",
    ]


def test_pidfile_names_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    wrap._write_pid(str(tmp_path / "monitor-{rank}.pid"))
    assert (tmp_path / "monitor-2.pid").read_text() == str(os.getpid())


def test_pidfile_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrap._write_pid(str(tmp_path / "no/such/folder/{rank}"))
    assert "Failed to write PID file" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store_factory": dict}, "store_factory: want a subclass of StoreMixin"),
        ({"monitor_process_pidfile": "pid"}, "monitor_process_pidfile: want an absolute path, got 'pid'"),
        ({"rank_assignment": None}, "rank_assignment: want RankAssignment, got None"),
        ({"health_check": 3}, "health_check: want HealthCheck or None, got 3"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        inprocess.Wrapper(**options)


def test_wrapper_that_is_not_enabled_returns_the_function_itself(tmp_path: Path) -> None:
    def train() -> None:
        """Do nothing."""

    wrapper = inprocess.Wrapper(enabled=False, monitor_process_pidfile=str(tmp_path / "pid"))
    assert wrapper(train) is train
