"""Each number, text and list of each message has a bound, and what is beyond it is refused by name."""

import json
import typing
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.message_values import values_of

from unbroken.agent.decisions.events import AgentMemory
from unbroken_core.pod import memory_messages, pod_messages, replica_messages
from unbroken_core.pod.pod_messages import WorkerReport
from unbroken_core.protocol import messages, wire
from unbroken_core.protocol.bounds import BOUNDS, MAX_NUMBER, Items, Number, Text, bound_of
from unbroken_core.protocol.messages import AgentMessage, Fault, Heartbeat, Hello, Plan, Report, WorkerState
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.reasons import Cause, Role, WorkerPhase

UNIONS = (
    messages.AgentMessage,
    messages.RendezvousMessage,
    pod_messages.FromWorker,
    pod_messages.FromLauncher,
    pod_messages.FromWatch,
    pod_messages.ToWorker,
    pod_messages.ToLauncher,
    replica_messages.ToHolder,
    replica_messages.ToOwner,
    replica_messages.AfterContent,
    replica_messages.ToReader,
    memory_messages.OfAgent,
)
KINDS: list[type] = [kind for union in UNIONS for kind in typing.get_args(union)]
KINDS += [messages.Observation, messages.Earlier, AgentMemory]


def parts_of(kind: Any) -> set[type]:
    """Return a message's type and the types of all messages in it."""
    if typing.get_args(kind):
        return set().union(*(parts_of(part) for part in typing.get_args(kind)))
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return set()
    return {kind}.union(*(parts_of(hint) for hint in typing.get_type_hints(kind).values()))


ALL_PARTS = sorted(set().union(*map(parts_of, KINDS)), key=lambda kind: kind.__name__)


def is_boundless(kind: Any) -> bool:
    """Return whether nothing but its type bounds a value: no closed list of words, no message of its own."""
    if typing.get_origin(kind) in (tuple, dict):
        return True
    if typing.get_args(kind):
        return any(map(is_boundless, typing.get_args(kind)))
    return kind in (int, float, str) or (isinstance(kind, type) and kind is not bool and not _is_closed(kind))


def _is_closed(kind: type) -> bool:
    return kind is type(None) or is_dataclass(kind) or issubclass(kind, Enum)


@pytest.mark.parametrize("kind", ALL_PARTS, ids=lambda kind: kind.__name__)
def test_every_number_text_and_list_of_a_message_is_in_the_table(kind: type) -> None:
    hints = typing.get_type_hints(kind)
    open_fields = [field.name for field in fields(kind) if is_boundless(hints[field.name])]
    assert [name for name in open_fields if bound_of(kind, name) is None] == []


def test_the_table_names_no_field_that_no_message_has() -> None:
    names = {field.name for kind in ALL_PARTS for field in fields(kind)}
    assert {name.rpartition(".")[2] for name in BOUNDS} - names == set()


def beyond(value: Any, bound: Any) -> list[Any]:
    """Return values of the same type that the bound does not allow."""
    if isinstance(bound, Number):
        return [kind(edge) for edge in (bound.low - 2, bound.high * 2 + 2, 1 << 70) for kind in (type(value),)]
    if isinstance(bound, Text):
        return ["x" * (bound.most + 1), *(["a\0b", "a\nb", "a b"] if bound.pattern else [])]
    if len(value) == 0 or bound.most > 5000:
        return []
    return [list(value) * (bound.most + 1)]


@pytest.mark.parametrize("kind", ALL_PARTS, ids=lambda kind: kind.__name__)
@settings(max_examples=10)
@given(data=st.data())
def test_a_value_beyond_its_bound_is_refused_by_name(kind: type, data: st.DataObject) -> None:
    sound = json.loads(wire.encode(data.draw(values_of(kind))))
    for name in [name for name in sound if name != "type" and bound_of(kind, name) is not None]:
        if sound[name] is None or isinstance(sound[name], bool):
            continue
        bound = bound_of(kind, name)
        assert bound is not None
        for bad in beyond(sound[name], bound):
            with pytest.raises(WireError, match=rf"^{kind.__name__}\.{name}: want .*, got ") as refused:
                wire.decode(json.dumps({**sound, name: bad}), kind)
            assert len(str(refused.value)) < 2000


STATE = WorkerState(0, 0, WorkerPhase.RUNNING, 3, fault=Fault(Cause.EXCEPTION, 3, "x" * 2001))
PLAN = Plan(1, 1 << 70, Role.ACTIVE, 1, "10.0.0.1", 1, ())


@pytest.mark.parametrize(
    ("message", "text"),
    [
        pytest.param(Heartbeat(1, 1 << 70), f"Heartbeat.max_step: want -1 to {MAX_NUMBER}, got {1 << 70}", id="step"),
        pytest.param(
            Report(1, (STATE,)),
            "Report.workers[0].fault.detail: want at most 2000 characters, got 'xxx",
            id="text of a fault, however deep",
        ),
        pytest.param(
            Report(1, tuple(WorkerState(0, 0, WorkerPhase.READY) for _ in range(65))),
            "Report.workers: want at most 64 items, got 65",
            id="more workers than any pod has",
        ),
        pytest.param(
            Hello(1, "digits", "p", "u", "s", "n", 1, plan=PLAN),
            f"Hello.plan.iteration: want -1 to {MAX_NUMBER}, got {1 << 70}",
            id="iteration that became the next plan's",
        ),
    ],
)
def test_refusal_says_what_where_seen_and_wanted(message: object, text: str) -> None:
    with pytest.raises(WireError) as refused:
        wire.decode(wire.encode(message), AgentMessage)
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize("host", ["a\0b", "a\nb", "a b", "$(x)", "\u0660", "x" * 254])
def test_an_endpoint_that_no_environment_could_hold_goes_to_no_other_pod(host: str) -> None:
    with pytest.raises(WireError, match=r"^WorkerReport\.host: want at most 253 characters of a host's name"):
        wire.decode(wire.encode(WorkerReport(WorkerPhase.READY, 0, host, 5000)), WorkerReport)


@pytest.mark.parametrize("host", ["", "10.0.0.1", "fe80::1%eth0", "[::1]", "digits-0.ns_1.svc"])
def test_hosts_and_addresses_are_endpoints(host: str) -> None:
    report = WorkerReport(WorkerPhase.READY, 0, host, 5000)
    assert wire.decode(wire.encode(report), WorkerReport) == report


def test_the_largest_lists_that_pods_send_fit() -> None:
    assert Items(2, Number(0, 5)).fault((0, 5)) == ""
    assert Items(2, Number(0, 5)).fault((0, 6)) == "in each item 0 to 5"
    assert Items(2, Number(0, 5), Text(1)).fault(((0, "a"), (1, "bb"))) == "in each item at most 1 characters"
    assert Items(2, Text(1)).fault({"aa": "b"}) == "in each item at most 1 characters"
