"""Orders to break something: each number has its bounds, whoever writes it."""

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unbroken.faults.worker_socket import is_same_user
from unbroken_core.pod.fault_orders import POD, WORKER, FaultOrder, is_allowed, read_order, write_order
from unbroken_core.vocabulary.errors import InputError

ID = "00112233445566ff"
FIELDS = ("rank", "code", "seconds", "milliseconds", "factor", "check", "verdict", "path", "max_bytes")


@pytest.mark.parametrize(
    "order",
    [
        FaultOrder(ID, "exception", 3),
        FaultOrder(ID, "exit", code=255),
        FaultOrder(ID, "slow", factor=1.1, seconds=3600),
        FaultOrder(ID, "slow", milliseconds=60_000),
        FaultOrder(ID, "check", check="my-probe", verdict="fatal"),
        FaultOrder(ID, "xid", code=79),
        FaultOrder(ID, "disk-full", path="/data", max_bytes=1 << 30),
    ],
)
def test_an_order_comes_back_as_it_was_written(order: FaultOrder) -> None:
    assert read_order(write_order(order)) == order


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "nuke"}, "kind: want one of exception, .*, got 'nuke'"),
        ({"kind": ["exit"]}, "kind: want one of"),
        ({"id": "../../x"}, "id: want 8 to 32 hexadecimal digits"),
        ({"kind": "exit", "code": 256}, "code: want 1 to 255, got 256"),
        ({"kind": "exit", "code": True}, "code: want 1 to 255, got True"),
        ({"kind": "xid", "code": 1024}, "code: want 1 to 1023"),
        ({"kind": "hang-gil", "seconds": float("nan")}, "seconds: want 1 to 3600, got nan"),
        ({"kind": "hang-gil", "seconds": 1e9}, r"seconds: want 1 to 3600, got 1000000000\.0"),
        ({"kind": "hang-gil", "seconds": "60"}, "seconds: want 1 to 3600, got 60"),
        ({"kind": "exception", "seconds": 3.0}, r"seconds: exception does not take it, got '3\.0'"),
        ({"kind": "slow"}, "slow: want either milliseconds or factor, got milliseconds 0 and factor 0"),
        ({"kind": "slow", "milliseconds": 5, "factor": 2}, "slow: want either milliseconds or factor"),
        ({"kind": "slow", "milliseconds": -1}, "milliseconds: want 0 to 60000, got -1"),
        ({"kind": "slow", "factor": 1}, r"factor: want 1\.01 to 100, got 1"),
        ({"kind": "disk-full", "path": "data", "max_bytes": 1}, "path: want an absolute path"),
        ({"kind": "disk-full", "path": "/data"}, "max_bytes: want 1 to"),
        ({"kind": "check", "check": "a b"}, "check: want small letters"),
        ({"kind": "check", "check": "a", "verdict": "ok"}, "verdict: want one of degraded, suspect, fatal"),
        ({"kind": "exception", "rank": -1}, "rank: want 0 to"),
        ({"kind": "exception", "more": 1}, "order: want id, kind and some of"),
    ],
)
def test_an_order_out_of_bounds_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_order(json.dumps({"id": ID, "kind": "exception", **fields}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"id": "' + 5000 * "0" + '"}', "[" * 4000])
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="order: want"):
        read_order(text)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.integers())


@given(st.sampled_from([*WORKER, *POD]), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_whatever_an_order_says_it_is_within_its_bounds_or_refused(kind: str, values: dict[str, Any]) -> None:
    try:
        order = read_order(json.dumps({**values, "id": ID, "kind": kind}))
    except InputError:
        return
    assert 1 <= order.seconds <= 3600
    assert 0 <= order.milliseconds <= 60_000
    assert 0 <= order.factor <= 100
    assert read_order(write_order(order)) == order


def test_a_pod_takes_orders_only_where_its_variable_says_so() -> None:
    seen = {text: is_allowed({"UNBROKEN_ALLOW_FAULTS": text}) for text in ("1", "true", "", "0", "false", "yes")}
    assert seen == {"1": True, "true": True, "": False, "0": False, "false": False, "yes": False}
    assert not is_allowed({})


class Peer:
    """A connection of somebody."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def getsockopt(self, _level: int, _name: int, _size: int) -> bytes:
        """Return who it is."""
        return struct.pack("3i", 1, self._uid, 1)


def test_only_the_workers_own_user_and_root_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert [is_same_user(Peer(uid)) for uid in (0, 1000, 1001, 65532)] == [True, True, False, False]  # type: ignore[arg-type] # as much of one as is looked at
