"""What hosts of a preflight say of themselves and of their pairs, which may be anything."""

import json
from typing import Any

import pytest

from unbroken.preflight.statements import PairResult, read_result

PASSED = {"passed": True, "why": "", "gbits": 10.0}


def test_a_result_is_read() -> None:
    assert read_result(PASSED) == PairResult(True, "", 10.0)


@pytest.mark.parametrize(
    "field",
    [
        pytest.param({"gbits": 10**400}, id="more than a float holds: the leader, and so all hosts, ended"),
        pytest.param({"gbits": 1e300}, id="absurdly fast"),
        pytest.param({"gbits": json.loads("NaN")}, id="no number"),
        pytest.param({"gbits": json.loads("Infinity")}, id="endlessly fast"),
        pytest.param({"gbits": -1}, id="slower than nothing"),
        pytest.param({"gbits": True}, id="no speed"),
        pytest.param({"passed": "yes"}, id="no answer"),
        pytest.param({"why": None}, id="no reason"),
    ],
)
def test_another_result_is_none(field: dict[str, Any]) -> None:
    assert read_result({**PASSED, **field}) is None


@pytest.mark.parametrize("value", [None, [], "passed", {}, {"passed": True}])
def test_what_is_no_result_is_none(value: Any) -> None:
    assert read_result(value) is None
