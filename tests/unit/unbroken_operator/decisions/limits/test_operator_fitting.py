"""Whatever a rendezvous reports, the status is one that the CRD takes: the schema here is the generated file's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from tests.unit.unbroken_operator.operator_world import a_recovery, running_world

from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.decisions.limits.fitting import fitted
from unbroken_operator.generate import CRD_PATH

JsonObject = dict[str, Any]
CRD = yaml.safe_load((Path(__file__).parents[5] / CRD_PATH).read_text())
SCHEMA: JsonObject = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
VALIDATOR = Draft202012Validator(SCHEMA, format_checker=FormatChecker())


def faults(status: Any) -> list[str]:
    """Return why an API server would refuse a status."""
    found = [f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in VALIDATOR.iter_errors(status)]
    for name, kind in SCHEMA["properties"].items():
        for key in kind.get("x-kubernetes-list-map-keys", ()):
            seen = [item[key] for item in status.get(name, ())]
            found += [f"{name}: {key} twice"] if len(set(seen)) < len(seen) else []
    return found


def values(schema: JsonObject) -> st.SearchStrategy[Any]:
    """Return values that look like the schema wants them, and often break its rules."""
    kind = schema.get("type")
    if kind == "object":
        names = list(schema.get("properties", {}))
        known = st.fixed_dictionaries({}, optional={name: values(schema["properties"][name]) for name in names})
        if "additionalProperties" not in schema:
            return st.one_of(known, JUNK)
        inner = st.one_of(values(schema["additionalProperties"]), JUNK)
        return st.dictionaries(st.text(max_size=8), inner, max_size=80)
    if kind == "array":
        return st.lists(st.one_of(values(schema["items"]), JUNK), max_size=25)
    if "enum" in schema:
        return st.one_of(st.sampled_from(schema["enum"]), JUNK)
    if kind == "string":
        times = st.sampled_from(["2026-01-01T00:00:00Z", "2026-13-01T00:00:00Z", "2026-01-01T00:00:00.123456+01:00"])
        return st.one_of(times, st.text(), st.integers(0, 5000).map(lambda size: "x" * size), JUNK)
    return st.one_of(st.integers(), st.floats(), st.booleans(), JUNK)


JUNK = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=5)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


@given(values(SCHEMA))
def test_every_status_is_made_to_fit_the_crd_and_one_that_fits_stays_as_it_is(status: Any) -> None:
    made = fitted(status if isinstance(status, dict) else {})
    assert faults(made) == []
    json.dumps(made, allow_nan=False)
    assert fitted(made) == made


A_RECORD: JsonObject = {
    "term": 1,
    "number": 1,
    "cause": "exception",
    "startedAt": "2026-01-01T00:00:00Z",
    "seconds": {"detect": 0.5},
}


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        pytest.param({"iteration": -1, "ettr": 0.5}, {"iteration": -1, "ettr": 0.5}, id="sound"),
        pytest.param({"iteration": 2**70}, {"iteration": 2**53 - 1}, id="a number beyond all"),
        pytest.param({"replicas": -3}, {"replicas": 0}, id="below the least"),
        pytest.param({"ettr": float("nan")}, {}, id="no number"),
        pytest.param({"state": "Cheerful"}, {}, id="another word"),
        pytest.param({"startTime": "yesterday"}, {}, id="no time"),
        pytest.param({"startTime": "2026-02-30T00:00:00Z"}, {}, id="no such day"),
        pytest.param({"selector": "x" * 600}, {"selector": "x" * 512}, id="too long"),
        pytest.param({"ofALaterRelease": {"x": 1}}, {"ofALaterRelease": {"x": 1}}, id="of a later release"),
        pytest.param({"history": [A_RECORD, {**A_RECORD, "startedAt": "?"}]}, {"history": [A_RECORD]}, id="a record"),
        pytest.param(
            {"history": [{**A_RECORD, "number": number} for number in range(30)]},
            {"history": [{**A_RECORD, "number": number} for number in range(10, 30)]},
            id="the newest records",
        ),
    ],
)
def test_what_does_not_fit_is_cut_moved_to_the_edge_or_left_out(status: JsonObject, wanted: JsonObject) -> None:
    assert fitted(status) == wanted


def test_a_report_full_of_excesses_becomes_a_status_that_is_accepted_and_is_written_once() -> None:
    world = running_world()
    wild = a_recovery(1, rank=-5, pod="p" * 5000, node="n" * 5000, domain="d" * 5000, detail="t" * 5000)
    wild = dataclasses.replace(
        wild,
        iteration_after=2**70,
        replaced_by=("s" * 400,) * 99,
        phase_s={f"phase {index}": 1e308 for index in range(99)},
        started_at="never",
    )
    honest = a_recovery(2)
    counts = {"restarts_by_rung": {f"{index}" * 300: 2**70 for index in range(99)}, "restarts_by_cause": {"x": -1}}
    numbers = {"iteration": 2**70, "world_size": -1, "ettr": 1e300}
    world.rendezvous_says(
        JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], recoveries=(wild, honest), **counts, **numbers
    )
    world.settle()
    assert faults(world.job["status"]) == []
    assert [item["number"] for item in world.job["status"]["history"]] == [2]
    num_writes = world.num_status_writes
    world.settle()
    assert world.num_status_writes == num_writes
