"""Whatever comes in, each parser answers with a value that others can use, or with its own error; nothing else."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.agent.adapters.local_server import MAX_LINE_BYTES, LocalServer, _read_line
from unbroken.agent.adapters.memory_file import read_memory
from unbroken.agent.adapters.stamp_page import read_stack
from unbroken.agent.decisions.events import AgentMemory
from unbroken.launch.error_file import MAX_ERROR_CHARACTERS, read_error
from unbroken.network.token import Caller, JobKeyFile, TokenFile
from unbroken.rendezvous.restored_state import TermFile
from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_core.pod.liveness import ages, find_hangs
from unbroken_core.pod.pod_messages import Attach, Processes, ProcessState, WorkerReport
from unbroken_core.pod.stacks import MAX_STACK_BYTES, stack_path
from unbroken_core.pod.stamps import page_bytes, unpack_slot
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import (
    PROTOCOL,
    AgentMessage,
    Earlier,
    Fault,
    Hello,
    JobStatus,
    Observation,
    Plan,
    PodObservation,
    RankPlan,
    RendezvousMessage,
    Report,
    WorkerState,
)
from unbroken_core.protocol.settings import JobSettings, Timeouts
from unbroken_core.vocabulary.errors import InputError, WireError
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, RankReason, Role, WorkerPhase

TOKEN = "0123456789abcdef0123456789abcdef"
STATE = WorkerState(0, 1, WorkerPhase.RUNNING, 3, "", 0, Fault(Cause.EXCEPTION, 3, "ValueError: x", 0.5, ("a:1 in f",)))
PLAN = Plan(2, 3, Role.ACTIVE, 4, "127.0.0.1", 600, (RankPlan(0, 1, RankReason.KEPT),), ("rack-1",))
SOUND: list[object] = [
    Hello(PROTOCOL, "digits", "digits-0", "uid-0", "s", "node-0", 1, ("rack-1",), 2, PLAN, (STATE,)),
    Report(1, (STATE,)),
    PLAN,
    Observation({"uid-0": PodObservation("digits-0", "node-0", ("rack-1",))}, True),
    Attach(PROTOCOL, "worker", 7, 0, 1),
    Processes((ProcessState(0, 1, 7, -9, "killed"),)),
    WorkerReport(WorkerPhase.READY, 3, "127.0.0.1", 600),
    Earlier(2, 3),
]
EXPECTED = (
    AgentMessage,
    RendezvousMessage,
    Observation,
    Attach,
    Processes,
    WorkerReport,
    Earlier,
    JobStatus,
    AgentMemory,
)

texts = st.text(st.characters(exclude_categories=()), max_size=6)
"""Halves of characters included, as file names that are no text have them."""
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def spoilt(draw: st.DrawFn, sound: st.SearchStrategy[Any]) -> Any:
    """Return sound JSON of which one part, however deep, is something else, missing, or more."""
    data = draw(sound)
    if not isinstance(data, (dict, list)) or not data or draw(st.integers(0, 3)) == 0:
        return draw(anything)
    keys: list[Any] = list(data) if isinstance(data, dict) else list(range(len(data)))
    key = draw(st.sampled_from(keys))
    change = draw(st.sampled_from(("deeper", "missing", "more")))
    if change == "deeper":
        data[key] = draw(spoilt(st.just(data[key])))
    elif change == "missing":
        del data[key]
    elif isinstance(data, dict):
        data[draw(texts)] = draw(anything)
    else:
        data.append(draw(anything))
    return data


def messages() -> st.SearchStrategy[Any]:
    return st.sampled_from(SOUND).map(lambda message: json.loads(wire.encode(message)))


def read_or_refuse(text: str | bytes, expected: Any) -> None:
    try:
        message = wire.decode(text, expected)
    except WireError as error:
        str(error).encode()
        return
    again = wire.encode(message)
    assert again.isascii()
    assert wire.encode(wire.decode(again, expected)) == again
    repr(message).encode()


@settings(max_examples=200)
@given(data=spoilt(messages()), expected=st.sampled_from(EXPECTED), is_ascii=st.booleans(), cut=st.integers(0, 400))
def test_spoilt_message_is_read_or_refused(data: Any, expected: Any, is_ascii: bool, cut: int) -> None:
    text = json.dumps(data, ensure_ascii=is_ascii)
    read_or_refuse(text, expected)
    read_or_refuse(text.encode(errors="surrogatepass"), expected)
    read_or_refuse(text[:cut], expected)


@given(data=st.binary(max_size=200), expected=st.sampled_from(EXPECTED))
def test_bytes_are_read_or_refused(data: bytes, expected: Any) -> None:
    read_or_refuse(data, expected)


def test_half_of_a_character_in_a_fault_costs_that_character_only() -> None:
    report = WorkerReport(
        WorkerPhase.STOPPING, 3, fault=Fault(Cause.EXCEPTION, 3, "FileNotFoundError: 'a\udcff\U0001f600'")
    )
    read = wire.decode(wire.encode(report), WorkerReport)
    assert read.fault.detail == "FileNotFoundError: 'a?\U0001f600'"


SETTINGS = JobSettings("digits", layers=(Layer("rack", "zone"),), timeouts=Timeouts(isolation_s=60.0))


@settings(max_examples=100)
@given(data=spoilt(st.builds(lambda: json.loads(wire.settings_to_json(SETTINGS)))))
def test_spoilt_settings_are_taken_or_refused_by_name(data: Any) -> None:
    try:
        wire.settings_from_json(json.dumps(data))
    except InputError as error:
        str(error).encode()


@given(first=spoilt(st.builds(lambda: json.loads(wire.encode(Attach(PROTOCOL, "worker", 7, 0, 1))))), rest=st.binary())
def test_lines_on_the_socket_of_a_pod_are_taken_or_refused(first: Any, rest: bytes) -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader(limit=1000)
        reader.feed_data(json.dumps(first).encode() + b"\n" + rest)
        reader.feed_eof()
        server = LocalServer(Path("unused"), 2, lambda _event: None)
        try:
            attach = await server._attach(reader)
            assert attach.role == "launcher" or 0 <= attach.local_rank < 2
            while (line := await _read_line(reader)) is not None:
                wire.decode(line, WorkerReport)
        except (WireError, ConnectionResetError) as error:
            str(error).encode()

    asyncio.run(scenario())


def test_line_without_an_end_is_refused_at_its_limit() -> None:
    async def scenario() -> None:
        reader = asyncio.StreamReader(limit=1000)
        reader.feed_data(b"x" * 3000)
        with pytest.raises(WireError, match=f"want at most {MAX_LINE_BYTES} bytes"):
            await _read_line(reader)

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parsers")


@given(header=texts | st.text().map(lambda text: f"Bearer {text}"), content=st.binary(max_size=60))
def test_only_the_token_is_accepted_whatever_the_file_becomes(folder: Path, header: str, content: bytes) -> None:
    path = folder / "token"
    path.write_text(TOKEN)
    token = TokenFile(path)
    assert not token.accepts(header)
    path.write_bytes(content)
    assert not token.accepts(header) or header.partition(" ")[2].strip().encode() == content.strip()
    assert token.accepts(f"Bearer {TOKEN}")


@given(
    header=texts | st.text().map(lambda text: f"Bearer {text}"),
    kind=st.sampled_from(Kind),
    pod=st.text(),
    content=st.binary(max_size=60),
)
def test_only_tokens_of_the_key_are_accepted_whatever_the_file_becomes(
    folder: Path, header: str, kind: Kind, pod: str, content: bytes
) -> None:
    path = folder / "job-key"
    path.write_text(TOKEN)
    keys = JobKeyFile(path, "uid")
    assert keys.accepts(header) is None
    mac = derive_token(TOKEN, kind, "uid", pod).rpartition("/")[2]
    assert keys.accepts(f"Bearer {kind}/{pod}x/{mac}") is None
    path.write_bytes(content)
    own = Caller(kind, "digits-0" if kind is Kind.AGENT else "")
    found = keys.accepts(f"Bearer {derive_token(TOKEN, kind, 'uid', own.pod)}")
    assert found is not None
    assert (found.kind, found.pod) == (own.kind, own.pod)


@given(content=st.binary(max_size=300) | anything.map(lambda data: json.dumps(data).encode()))
def test_error_file_gives_a_short_line(folder: Path, content: bytes) -> None:
    path = folder / "error.json"
    path.write_bytes(content)
    line = read_error(path)
    assert len(line) <= MAX_ERROR_CHARACTERS
    assert not line.encode().count(b"\n")


def test_error_file_that_is_nested_without_end_gives_a_line(folder: Path) -> None:
    path = folder / "error.json"
    path.write_text("[" * 100_000)
    assert read_error(path) == "[" * MAX_ERROR_CHARACTERS


@given(page=st.binary(min_size=page_bytes(2), max_size=page_bytes(2)), now_ns=st.integers(0, 2**63))
def test_page_of_stamps_and_locks_may_say_anything(page: bytes, now_ns: int) -> None:
    slots = {rank: unpack_slot(page, rank) for rank in range(2)}
    for hang in find_hangs(slots, now_ns, Timeouts()):
        assert hang.age_s >= Timeouts().soft_s
    assert all(ages(slot, now_ns).oldest_s >= 0 for slot in slots.values())


@given(content=st.binary(max_size=200) | st.text("0123456789 -\n", max_size=40).map(str.encode))
def test_files_of_the_process_before_are_read_or_passed_over(folder: Path, content: bytes) -> None:
    (folder / "term").write_bytes(content)
    term, iteration = TermFile(folder).read()
    assert (type(term), type(iteration)) == (int, int)
    for name in ("agent-0.memory", "agent-1.memory"):
        (folder / name).write_bytes(content)
    assert read_memory(folder) == AgentMemory()


def test_number_of_thousands_of_digits_is_no_memory(folder: Path) -> None:
    (folder / "agent-0.memory").write_bytes(b"00000000 " + b"9" * 5000 + b" 9\n")
    assert read_memory(folder) == AgentMemory()


@given(content=st.binary(max_size=300))
def test_stack_of_a_worker_is_a_limited_number_of_lines(folder: Path, content: bytes) -> None:
    stack_path(folder, 0).write_bytes(content * 2)
    frames = read_stack(folder, 0)
    assert sum(map(len, frames)) <= MAX_STACK_BYTES
    wire.encode(Fault(Cause.SOFT_TIMEOUT, 1, stack=frames)).encode()
