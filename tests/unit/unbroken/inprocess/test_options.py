"""WrapperOptions of the wrapper, and what the decorator itself does."""

import datetime
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unbroken import inprocess
from unbroken.inprocess import rank_assignment as ra
from unbroken.inprocess.assignment.policy import violation
from unbroken.inprocess.exception import NoAgentError
from unbroken.inprocess.loop.call_wrapper import CallWrapper
from unbroken.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    MaxActiveWorldSize,
    RankAssignment,
    ShiftRanks,
)

SECONDS = {
    "monitor_thread_interval": 1,
    "monitor_process_interval": 1,
    "heartbeat_interval": 1,
    "progress_watchdog_interval": 1,
    "soft_timeout": 60,
    "hard_timeout": 90,
    "heartbeat_timeout": 30,
    "barrier_timeout": 120,
    "completion_timeout": 120,
    "last_call_wait": 1,
    "termination_grace_time": 5,
}


class OwnPolicy(ShiftRanks):
    """Nobody but its author knows what it decides."""


def seconds(value: float) -> datetime.timedelta:
    """Return a timedelta."""
    return datetime.timedelta(seconds=value)


def test_options_are_keyword_only_with_the_defaults_of_the_reference() -> None:
    """2.1"""
    parameters = dict(inspect.signature(inprocess.Wrapper).parameters)
    assert parameters.pop("positional").kind is inspect.Parameter.VAR_POSITIONAL, "refused with a sentence"
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert {name: parameters[name].default for name in SECONDS} == {k: seconds(v) for k, v in SECONDS.items()}
    assert isinstance(parameters["abort"].default, inprocess.abort.AbortTorchDistributed)
    assert parameters["enabled"].default is True


def test_default_that_wrappers_share_cannot_be_changed_by_one_of_them() -> None:
    """2.26"""
    defaults = [parameter.default for parameter in inspect.signature(inprocess.Wrapper).parameters.values()]
    plain = (type(None), bool, int, float, str, datetime.timedelta)
    given = [default for default in defaults if default is not inspect.Parameter.empty]
    (shared,) = [default for default in given if not isinstance(default, plain)]
    assert isinstance(shared, inprocess.abort.AbortTorchDistributed)
    with pytest.raises(AttributeError):
        setattr(shared, "timeout", datetime.timedelta(0))  # noqa: B010 - mypy knows that it is read-only
    assert shared.timeout == datetime.timedelta(seconds=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initialize": 1}, "initialize: want Initialize or None, got 1 of type int"),
        ({"abort": len}, "abort: want Abort or None"),
        ({"finalize": "x"}, "finalize: want Finalize or None"),
        ({"health_check": 1.0}, "health_check: want HealthCheck or None"),
        ({"completion": 1}, "completion: want Completion or None"),
        ({"terminate": 1}, "terminate: want Terminate or None"),
        ({"soft_timeout": 60}, "soft_timeout: want timedelta, got 60 of type int"),
        ({"last_call_wait": None}, "last_call_wait: want timedelta, got None"),
        ({"enabled": 1}, "enabled: want bool, got 1"),
        ({"store_kwargs": []}, "store_kwargs: want Mapping or None"),
        ({"store_factory": "TCPStore"}, "store_factory: want a class or None"),
        ({"monitor_process_logfile": 1}, "monitor_process_logfile: want str or None"),
        ({"rank_assignment": 1}, "rank_assignment: want RankAssignment or None"),
    ],
)
def test_option_of_a_wrong_type_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    """2.2"""
    with pytest.raises(TypeError, match=message):
        inprocess.Wrapper(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"soft_timeout": seconds(90)}, r"soft_timeout: want less than hard_timeout \(90 s\), got 90 s"),
        ({"hard_timeout": seconds(120)}, r"hard_timeout: want less than barrier_timeout \(120 s\), got 120 s"),
        ({"heartbeat_timeout": seconds(120)}, "heartbeat_timeout: want less than barrier_timeout"),
        ({"heartbeat_interval": seconds(30)}, "heartbeat_interval: want less than heartbeat_timeout"),
        ({"monitor_process_interval": seconds(30)}, "monitor_process_interval: want less than heartbeat_timeout"),
        ({"monitor_thread_interval": seconds(60)}, "monitor_thread_interval: want less than soft_timeout"),
        ({"progress_watchdog_interval": seconds(60)}, "progress_watchdog_interval: want less than soft_timeout"),
        ({"soft_timeout": seconds(0)}, "soft_timeout: want more than 0 seconds, got 0"),
        ({"last_call_wait": seconds(-1)}, "last_call_wait: want more than 0 seconds, got -1"),
        ({"monitor_process_logfile": "log"}, "monitor_process_logfile: want an absolute path, got 'log'"),
        ({"rank_assignment": ra.Tree([])}, "Tree: layers: want at least the root, got none"),
        (
            {"rank_assignment": ra.Tree([ra.Layer()]), "rank_filter": MaxActiveWorldSize(4)},
            "rank_filter: want None, because Tree decides who is active, got <.*MaxActiveWorldSize",
        ),
        (
            {"rank_assignment": ra.FilterCountGroupedByKey("", bool)},
            r"FilterCountGroupedByKey: want ShiftRanks or another step that renumbers to the left of it, .* got",
        ),
        (
            {"rank_assignment": inprocess.Compose(MaxActiveWorldSize(4), ra.FilterCountGroupedByKey("", bool))},
            "FilterCountGroupedByKey: want ShiftRanks or another step that renumbers to the left of it",
        ),
        (
            {"rank_assignment": inprocess.Compose(ra.FilterCountGroupedByKey("", bool), ShiftRanks())},
            "FilterCountGroupedByKey: want ShiftRanks or another step that renumbers to the left of it",
        ),
    ],
)
def test_option_out_of_order_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    """2.2, 2.25"""
    with pytest.raises(ValueError, match=message):
        inprocess.Wrapper(**options)


@pytest.mark.parametrize(
    ("policy", "size", "expected"),
    [
        (None, 3, ""),
        (ShiftRanks(), 3, ""),
        (inprocess.Compose(OwnPolicy(), ShiftRanks()), 3, ""),
        (inprocess.Compose(ActivateAllRanks(), ShiftRanks()), 3, ""),
        (MaxActiveWorldSize(), 1000, ""),
        (MaxActiveWorldSize(3), 3, ""),
        (MaxActiveWorldSize(3), 4, "want at most 3 active ranks, got 4; set world.maxRanks to 3"),
        (ActiveWorldSizeDivisibleBy(4), 8, ""),
        (
            inprocess.Compose(ActiveWorldSizeDivisibleBy(4), MaxActiveWorldSize(9), ShiftRanks()),
            6,
            "want a multiple of 4 active ranks, got 6; set world.divisibleBy to 4",
        ),
    ],
)
def test_policy_of_the_reference_is_held_against_the_plan(
    policy: RankAssignment | None, size: int, expected: str
) -> None:
    """2.8: the coordinator assigns; a plan that does not follow is not run."""
    assert inprocess.Wrapper(rank_assignment=policy).options.rank_assignment is policy
    assert violation(policy, size).partition(": ")[2] == expected


def test_disabled_wrapper_returns_the_function_itself() -> None:
    """2.3"""

    def train() -> None: ...

    assert inprocess.Wrapper(enabled=False)(train) is train


def test_wrapped_function_keeps_its_metadata() -> None:
    """2.3"""

    def train(one: int) -> int:
        """Train."""
        return one

    wrapped = inprocess.Wrapper()(train)
    assert (wrapped.__name__, wrapped.__doc__, wrapped.__wrapped__) == ("train", "Train.", train)  # type: ignore[attr-defined] # functools.wraps sets it


def test_generator_and_coroutine_are_refused() -> None:
    """What runs after the call returns cannot be restarted."""

    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match="want one that runs when it is called"):
            inprocess.Wrapper()(function)


def test_call_without_an_agent_says_how_to_start_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """No environment is an error that helps."""
    monkeypatch.delenv("UNBROKEN_DIR", raising=False)
    with pytest.raises(NoAgentError, match="unbroken run --pods"):
        inprocess.Wrapper()(lambda: None)()


def test_importing_the_package_imports_no_torch() -> None:
    """The import is cheap."""
    import subprocess
    import sys

    code = "import sys, unbroken.inprocess; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "False\n"


def test_stores_of_the_reference_are_torchs_own() -> None:
    """2.1: a script that names a store factory needs no change."""
    import torch.distributed as dist

    from unbroken.inprocess.store import FileStore, PrefixStore, TCPStore

    stores = [getattr(dist, name) for name in ("FileStore", "PrefixStore", "TCPStore")]
    assert [FileStore, PrefixStore, TCPStore] == stores
    options = inprocess.Wrapper(store_factory=TCPStore, store_kwargs={"port": 1}).options
    assert options.store_factory is TCPStore
    assert dir(inprocess.store) == ["FileStore", "PrefixStore", "TCPStore"]
    with pytest.raises(AttributeError, match="want one of FileStore, PrefixStore, TCPStore"):
        _ = inprocess.store.HashStore


def test_nested_restarter_logs_the_states_of_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    """The lines that the reference's launcher reads, from the rank that speaks for all."""
    nested = inprocess.nested_restarter
    first = inprocess.FrozenState(rank=0, world_size=2, active_rank=0, initial_rank=0)
    other = inprocess.FrozenState(rank=1, world_size=2, active_rank=1, initial_rank=1)
    begun = nested.NestedRestarterHandlingCompleted()
    plugins: list[Callable[[inprocess.FrozenState], inprocess.FrozenState]] = [
        begun,
        nested.NestedRestarterHandlingStarting(),
        begun,
        nested.NestedRestarterFinalized(),
        nested.NestedRestarterAborted(),
    ]
    with caplog.at_level("INFO", logger="unbroken.inprocess"):
        for plugin in plugins:
            assert plugin(first) is first
        for plugin in plugins:
            assert plugin(other) is other
    assert [message.partition("name=[InProcess] ")[2] for message in caplog.messages] == [
        "state=initialize",
        "state=handling stage=starting",
        "state=handling stage=completed",
        "state=finalized",
        "state=aborted",
    ]


def test_call_wrapper_is_given_where_it_is_annotated() -> None:
    """2.9: CallWrapper and Optional[CallWrapper], by any spelling of the annotation."""
    from unbroken.inprocess.loop.parameters import bind_by_annotation

    def plain(one: int, call: CallWrapper, two: int = 2) -> None: ...

    def optional(call: CallWrapper | None = None, *, also: "inprocess.CallWrapper") -> None: ...

    def without(one: int) -> None: ...

    given = object()
    assert bind_by_annotation(plain, (1,), {}, CallWrapper, given) == ((1, given, 2), {})
    assert bind_by_annotation(optional, (), {}, CallWrapper, given) == ((given,), {"also": given})
    assert bind_by_annotation(without, (1,), {}, CallWrapper, given) == ((1,), {})
    with pytest.raises(TypeError, match="missing a required argument: 'one'"):
        bind_by_annotation(plain, (), {}, CallWrapper, given)
    with pytest.raises(TypeError, match="missing a required argument: 'one'; no parameter is annotated with Call"):
        bind_by_annotation(without, (), {}, CallWrapper, given)
    assert bind_by_annotation(max, (1, 2), {}, CallWrapper, given) == ((1, 2), {})


def test_a_decorator_without_parentheses_is_refused_with_how_it_is_written() -> None:
    def train() -> None:
        """Do nothing."""

    with pytest.raises(TypeError, match=r"with parentheses \(@unbroken\.inprocess\.Wrapper\(\)\).*got 'train'"):
        inprocess.Wrapper(train)  # type: ignore[arg-type]
