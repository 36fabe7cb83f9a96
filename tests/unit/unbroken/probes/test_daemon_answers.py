"""What a node's health daemon is asked, and what its answers mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.probes.daemon_answer import (
    MAX_ANSWER_BYTES,
    MAX_LINE,
    DaemonAnswer,
    decode_answer,
    encode_request,
    judge_answer,
    line_of,
)
from unbroken.probes.node_daemon import read_endpoint
from unbroken.watch.errors import NotCheckedError
from unbroken_core.vocabulary.errors import InputError

GOOD = b"\x08\x01"


def test_a_request_is_as_protocol_buffers_have_it() -> None:
    """Compared with what Google's library writes."""
    assert encode_request([]) == b""
    assert encode_request(["--gpu", "", "ü" * 100]) == b"\n\x05--gpu\n\x00\n\xc8\x01" + "ü".encode() * 100
    with pytest.raises(InputError, match=r"ARG: want UTF-8, got '\\udcff'"):
        encode_request(["\udcff"])


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        pytest.param(b"", DaemonAnswer(), id="all left out"),
        pytest.param(b"\x08\x01\x10\x03\x1a\x02{}", DaemonAnswer(True, 3, "{}"), id="all"),
        pytest.param(b"\x1a\x02{}\x08\x01", DaemonAnswer(True, 0, "{}"), id="in another order"),
        pytest.param(
            b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", DaemonAnswer(False, -1, ""), id="a negative number"
        ),
        pytest.param(b"\x08\x00\x08\x01\x1a\x01a\x1a\x01b", DaemonAnswer(True, 0, "b"), id="the last one counts"),
        pytest.param(
            b"\x20\x05\x29" + bytes(8) + b"\x35" + bytes(4) + b"\x3a\x03abc\xa2\x06\x01x" + GOOD,
            DaemonAnswer(True),
            id="fields of later versions",
        ),
        pytest.param(b"\x1a\x02\xff\xfe", DaemonAnswer(False, 0, "\ufffd\ufffd"), id="no UTF-8"),
    ],
)
def test_an_answer_is_read(data: bytes, answer: DaemonAnswer) -> None:
    assert decode_answer(data) == answer


@pytest.mark.parametrize(
    ("data", "text"),
    [
        pytest.param(b"\x1a\x05ab", "ends in field 3: want 5 bytes, got 2", id="cut"),
        pytest.param(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "ends in field 3", id="a length beyond all bounds"),
        pytest.param(b"\x29\x00", "ends in field 5: want 8 bytes, got 1", id="a cut number"),
        pytest.param(b"\x10\x80", "want a number at byte 1 of 2, got one without an end", id="a number without an end"),
        pytest.param(b"\x08" + b"\x80" * 11, "got one without an end", id="a number that is too long"),
        pytest.param(b"\x00\x01", "want a field's number before byte 1, got 0", id="no field"),
        pytest.param(b"\x80\x80\x80\x80\x10\x00", "before byte 5, got 536870912", id="a field beyond all bounds"),
        pytest.param(b"\x0b", "field 1 has the unknown wire type 3", id="a group"),
        pytest.param(b"\x0f", "field 1 has the unknown wire type 7", id="no wire type"),
        pytest.param(b"\x0a\x00", "want a number as field 1 (success), got a length and bytes", id="other fields"),
        pytest.param(b"\x18\x00", "want a length and bytes as field 3 (output), got a number", id="other fields, too"),
        pytest.param(b"x" * (MAX_ANSWER_BYTES + 1), "want at most 1048576 bytes, got 1048577", id="too long"),
    ],
)
def test_what_is_no_answer_is_unknown_and_said(data: bytes, text: str) -> None:
    with pytest.raises(NotCheckedError) as refused:
        decode_answer(data)
    assert text in str(refused.value)


@given(st.binary(max_size=64))
def test_whatever_comes_is_an_answer_or_unknown(data: bytes) -> None:
    try:
        answer = decode_answer(data)
    except NotCheckedError:
        return
    message = judge_answer(answer).message
    assert message.isprintable()
    assert len(message) <= MAX_LINE


@pytest.mark.parametrize(
    ("answer", "is_healthy", "message"),
    [
        pytest.param(DaemonAnswer(True), True, "passed: exit code 0", id="healthy"),
        pytest.param(DaemonAnswer(True, 0, '{"fail_count": 0}'), True, "passed: exit code 0, fail_count 0", id="0"),
        pytest.param(
            DaemonAnswer(True, 0, '{"fail_count": 2, "error": "NIC mlx5_3"}'),
            False,
            "failed: exit code 0, fail_count 2: NIC mlx5_3",
            id="failures in a success",
        ),
        pytest.param(
            DaemonAnswer(True, 0, '{"fail_count": 0.5}'),
            False,
            'failed: exit code 0, fail_count 0.5: {"fail_count": 0.5}',
            id="failures without an error",
        ),
        pytest.param(
            DaemonAnswer(False, 4, '{"fail_count": 0, "error": "  GPU 3\\n"}'),
            False,
            "failed: exit code 4, fail_count 0: GPU 3",
            id="a failure that counts none",
        ),
        pytest.param(DaemonAnswer(), False, "failed: exit code 0", id="an empty answer"),
        pytest.param(
            DaemonAnswer(True, 0, "all is well"),
            True,
            "passed: exit code 0, its output is no JSON",
            id="no JSON",
        ),
        pytest.param(
            DaemonAnswer(False, 1, "boom"),
            False,
            "failed: exit code 1, its output is no JSON: boom",
            id="no JSON of a failure",
        ),
        pytest.param(DaemonAnswer(True, 0, "[1]"), True, "passed: exit code 0, its output is no JSON object", id="[]"),
        pytest.param(
            DaemonAnswer(True, 0, '{"fail_count": NaN}'),
            True,
            "passed: exit code 0, its output is no JSON",
            id="NaN",
        ),
        pytest.param(
            DaemonAnswer(True, 0, '{"fail_count": "3"}'),
            True,
            "passed: exit code 0, its fail_count '3' is no number",
            id="a number in words",
        ),
        pytest.param(
            DaemonAnswer(True, 0, '{"fail_count": true}'),
            True,
            "passed: exit code 0, its fail_count 'True' is no number",
            id="no number",
        ),
        pytest.param(
            DaemonAnswer(True, 0, '{"error": "", "fail_count": 1' + "0" * 4000 + "}"),
            False,
            "failed: exit code 0, fail_count 10000000000000000000",
            id="a number beyond all bounds",
        ),
        pytest.param(
            DaemonAnswer(True, 0, '{"fail_count": 1' + "0" * 5000 + "}"),
            True,
            "passed: exit code 0, its output is no JSON",
            id="one that Python does not read",
        ),
        pytest.param(
            DaemonAnswer(True, 0, "[" * 100_000),
            True,
            "passed: exit code 0, its output is no JSON",
            id="nested too deeply",
        ),
    ],
)
def test_a_node_is_as_healthy_as_the_extension_would_call_it(
    answer: DaemonAnswer, is_healthy: bool, message: str
) -> None:
    verdict = judge_answer(answer)
    assert (verdict.is_healthy, verdict.message) == (is_healthy, f"the daemon's check {message}")


def test_hostile_words_are_one_line_that_changes_no_terminal() -> None:
    error = "\x1b[2J\r\nok: \u202e\ud800" + "x" * 100_000
    message = judge_answer(DaemonAnswer(False, 1, json.dumps({"error": error}))).message
    assert message.startswith("the daemon's check failed: exit code 1: \\x1b[2J\\r\\nok: \\u202e\\ud800xxx")
    assert (len(message), message[-4:]) == (MAX_LINE, "x...")
    assert message.encode().decode() == message
    assert len(line_of("\n" * 100_000)) == MAX_LINE


@pytest.mark.parametrize("text", ["/var/run/nvhcd.sock", "unix:///var/run/nvhcd.sock", "unix:/var/run/nvhcd.sock"])
def test_an_endpoint_is_a_unix_socket_in_the_forms_that_the_extension_takes(text: str) -> None:
    assert read_endpoint(text) == "/var/run/nvhcd.sock"


@pytest.mark.parametrize(
    "text",
    [
        *("", "localhost:50051", "dns:///localhost:50051", "nvhcd.sock", "unix:nvhcd.sock", "unix://host/nvhcd.sock"),
        *("unix-abstract:nvhcd", "/nul\0", f"/{'a' * 107}", "https://example.com/x"),
    ],
)
def test_any_other_endpoint_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--endpoint: want the absolute path of a Unix socket"):
        read_endpoint(text)
