"""Whoever may write to `/status` may have put anything there: a job goes on, and what cannot be is repaired."""

from typing import Any

import pytest
from hypothesis import given
from tests.unit.unbroken_operator.operator_world import World, a_job, merge_patch, running_world
from tests.unit.unbroken_operator.test_operator_held_jobs import worker_of

from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Earlier
from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.decisions.admission import held
from unbroken_operator.decisions.limits.fitting import fitted
from unbroken_operator.decisions.limits.stored_status import MAX_FAULTS, MAX_NEXT_ORDINAL, MAX_SHOWN, believed
from unbroken_operator.decisions.quarantine import JobsView
from unbroken_operator.decisions.review import answer
from unbroken_operator.decisions.suspects import score_now

from .test_operator_fitting import SCHEMA, faults, values

JsonObject = dict[str, Any]
NOW, BIG = "2026-01-01T00:00:00Z", 2**63 - 1
TIMES = ("2026-01-01T00:00:00+99:99", "2026-01-01T00:00:00x1Z", "0000-01-01T00:00:00Z")


def condition(kind: str, at: str) -> JsonObject:
    """Return a condition that holds."""
    item = {"type": kind, "status": "True", "reason": "x", "message": "m", "observedGeneration": BIG}
    return {**item, "lastTransitionTime": at}


def edits() -> list[Any]:
    """Return what somebody wrote, all of which an API server took."""
    found = [pytest.param({"startTime": at}, id=f"start {at}") for at in TIMES]
    suspect = {"name": "a", "faults": BIG, "score": 1e308, "scoreTime": TIMES[0]}
    record = {
        "term": BIG,
        "number": BIG,
        "cause": "x",
        "iteration": BIG,
        "startedAt": TIMES[0],
        "seconds": {"a": 1e308},
    }
    term = {"podUid": "x", "term": BIG, "earlier": {"total": BIG, "byRung": {"x": BIG}, "byCause": {"y\n": 1}}}
    accepted = {"ranksPerPod": 2, "layers": [], "isInProcess": True}
    others = {
        "suspects": {"suspectNodes": [suspect]},
        "history": {"history": [record], "lastRecovery": record},
        "time": {"time": {"term": 1, "reportedAt": TIMES[2], "heldRankSeconds": 1e308}},
        "seconds that nobody has": {"time": {"term": 0, "reportedAt": NOW, "progressSeconds": 9e8, "redoSeconds": 9e8}},
        "ancient time": {"time": {"term": 0, "reportedAt": "0001-01-01T00:00:00Z", "progressSeconds": 1.0}},
        "times of conditions": {"conditions": [condition("Admitted", at) for at in TIMES[:1]]},
        "ordinals": {"nextPodOrdinal": 10**12, "nextRendezvousOrdinal": BIG},
        "terms": {"endedTerm": BIG, "rendezvous": term},
        "iteration": {"iteration": -BIG},
        "no ranks": {"accepted": {**accepted, "ranksPerPod": 0}},
        "too many ranks": {"accepted": {**accepted, "ranksPerPod": BIG}},
        "layers that no spec has": {"accepted": {**accepted, "layers": ["\u0000"] * 8}},
        "a layer twice": {"accepted": {**accepted, "layers": ["a=b", "a=c"]}},
    }
    return found + [pytest.param(status, id=name) for name, status in others.items()]


def changed_fields(before: JsonObject, after: JsonObject) -> set[str]:
    """Return the names of the fields that differ."""
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


@pytest.mark.parametrize("edit", edits())
def test_a_status_that_cannot_be_keeps_no_pod_from_its_replacement_and_is_repaired(edit: JsonObject) -> None:
    world = running_world(activeDeadlineSeconds=100_000, ttlSecondsAfterFinished=100_000)
    world.job["status"] = merge_patch(world.job["status"], edit)
    # A new process of the operator, which knows nothing but this.
    world.memory = type(world.memory)()
    world.remove_pod("digits-0")
    world.settle()
    assert world.names() == ["digits-1", "digits-2", "digits-3"]
    assert "digits-rendezvous-0" in world.names("rendezvous")
    assert world.condition("Admitted") == ("True", "SpecAccepted")
    assert faults(world.job["status"]) == []
    assert believed(world.job["status"]) == (world.job["status"], ())
    num_writes = world.num_status_writes
    world.settle()
    assert world.num_status_writes == num_writes


def test_a_new_rendezvous_is_told_nothing_that_it_refuses() -> None:
    world = World()
    edit = {"iteration": -BIG, "endedTerm": BIG, "history": [{"iteration": BIG}], "nextRendezvousOrdinal": 10**12}
    world.job["status"] = edit
    world.settle()
    (name,) = world.names("rendezvous")
    assert name == "digits-rendezvous-0"
    variables = world.pods[name]["spec"]["containers"][0]["env"]
    for text in [item["value"] for item in variables if item["name"] == "UNBROKEN_EARLIER"]:
        wire.decode(text, (Earlier,))


@pytest.mark.parametrize("at", TIMES)
def test_a_job_that_is_over_stays_so_though_its_times_cannot_be_and_goes_in_time(at: str) -> None:
    world = running_world(ttlSecondsAfterFinished=60)
    world.rendezvous_says(JobPhase.COMPLETE, ["digits-0", "digits-1"], ["digits-2"])
    world.settle()
    conditions = [{**item, "lastTransitionTime": at} for item in world.job["status"]["conditions"]]
    world.job["status"] |= {"completionTime": at, "conditions": conditions}
    world.now = "2026-01-01T01:00:00Z"
    world.settle()
    assert world.condition("Complete")[0] == "True"
    assert {item["lastTransitionTime"] for item in world.job["status"]["conditions"]} == {world.now}
    assert "deletionTimestamp" not in world.job["metadata"]
    world.now = "2026-01-01T01:02:00Z"
    for name in world.names():
        world.end_pod(name, "Succeeded")
    world.settle()
    assert world.job["metadata"]["deletionTimestamp"] == world.now


@pytest.mark.parametrize("told", [10**12, MAX_NEXT_ORDINAL - 1, MAX_NEXT_ORDINAL + 1])
def test_pods_are_known_as_the_jobs_whatever_ordinal_somebody_wrote(told: int) -> None:
    world = running_world()
    world.job["status"]["nextPodOrdinal"] = told
    world.remove_pod("digits-0")
    world.settle()
    assert len(world.names()) == 3
    assert world.job["status"]["nextPodOrdinal"] == (told + 1 if told < MAX_NEXT_ORDINAL else 4)


def test_a_field_that_is_not_believed_is_told_once_with_job_seen_and_wanted(caplog: pytest.LogCaptureFixture) -> None:
    worker = worker_of(a_job() | {"status": {"nextPodOrdinal": 10**12, "startTime": TIMES[0]}})

    def num_counted() -> float | None:
        registry = worker._shared.metrics.registry
        return registry.get_sample_value("unbroken_operator_refusals_total", {"what": "status"})

    assert num_counted() == 2
    for version in range(2, 5):
        metadata = a_job()["metadata"] | {"resourceVersion": str(version)}
        worker.update(
            a_job() | {"metadata": metadata, "status": {"nextPodOrdinal": 10**12 + version, "state": "x" * 500}}
        )
    lines = [record.getMessage() for record in caplog.records if "not believed" in record.getMessage()]
    start = "status is not believed job=ml/digits field="
    assert lines[:2] == [
        f"{start}status.nextPodOrdinal seen=1000000000000 wanted=from 0 to {MAX_NEXT_ORDINAL}",
        f"{start}status.startTime seen='{TIMES[0]}' wanted=what the CRD allows, times of RFC 3339",
    ]
    assert len(lines) == 3
    assert lines[2].startswith(f"{start}status.state seen='xxx")
    assert len(lines[2]) < 300
    # Counted with each version of the job that has it: two, and three times two.
    assert num_counted() == 8
    metadata = a_job()["metadata"] | {"resourceVersion": "9"}
    worker.update(a_job() | {"metadata": metadata, "status": {"nextPodOrdinal": 3}})
    assert num_counted() == 8


def test_a_webhook_takes_a_change_by_facts_that_no_spec_has_for_none() -> None:
    job = a_job() | {"status": {"accepted": {"ranksPerPod": 0, "layers": [], "isInProcess": True}}}
    resource = {"group": "unbroken.dev", "version": "v1alpha1", "resource": "resilienttrainingjobs"}
    request = {"uid": "u", "operation": "UPDATE", "resource": resource, "object": job, "oldObject": job}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    assert answer(review, ()).to_json()["response"] == {"uid": "u", "allowed": True}


def test_what_cannot_be_of_suspects_reaches_nobody() -> None:
    status = {"suspectNodes": [{"name": "a", "faults": 1, "score": 9.0, "scoreTime": at} for at in (*TIMES, NOW)]}
    found = held(a_job() | {"status": status})["status"]["suspectNodes"]
    view = JobsView("ml", "digits", found, frozenset("a"))
    assert [score_now(item, NOW) for item in view.suspects] == [9.0]


@given(values(SCHEMA))
def test_what_is_believed_fits_and_is_believed_again(status: Any) -> None:
    found, told = believed(status)
    timed = {**found, "conditions": [{"lastTransitionTime": NOW, **item} for item in found.get("conditions", ())]}
    assert faults(timed) == []
    assert fitted(timed) == timed
    assert believed(timed) == (timed, ())
    assert len(told) <= MAX_FAULTS
    assert all(len(fault.seen) <= MAX_SHOWN for fault in told)


def test_a_status_that_the_operator_wrote_is_believed_as_it_is() -> None:
    world = running_world(topology={"layers": [{"name": "rack", "label": "example.com/rack"}]})
    assert believed(world.job["status"]) == (world.job["status"], ())
