"""Suspension, deadline, time to live and what is left of a job's pods."""

import dataclasses
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_job, a_recovery, running_world

from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Earlier
from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import CreatePod, DeleteJob, DeletePod, WriteStatus
from unbroken_operator.decisions.plan import plan


def set_spec(world: World, **spec: Any) -> None:
    """Change the spec, as a user would."""
    world.job["spec"] |= spec
    world.job["metadata"]["generation"] += 1


def reasons(world: World) -> list[str]:
    """Return the reasons of the Events."""
    return sorted(item["reason"] for item in world.events.values())


def end_all(world: World) -> None:
    """Let every pod that is being deleted be gone."""
    for name in [*world.names(), *world.names(layout.RENDEZVOUS)]:
        if "deletionTimestamp" in world.pods[name]["metadata"]:
            world.remove_pod(name)


def suspended_world(**spec: Any) -> World:
    """Return the running world after it was suspended and all its pods have ended."""
    world = running_world(**spec)
    set_spec(world, suspend=True)
    for _ in range(2):
        world.settle()
        end_all(world)
    world.settle()
    return world


def test_a_job_that_is_made_suspended_has_no_pods_until_it_is_resumed() -> None:
    world = World(a_job(suspend=True))
    world.settle()
    assert (world.created, world.secret, world.service) == ([], None, None)
    assert world.job["status"]["state"] == "Suspended"
    assert world.condition("Suspended") == ("True", "Suspended")
    assert world.condition("Admitted") == ("True", "SpecAccepted")
    assert "startTime" not in world.job["status"]
    assert reasons(world) == ["Suspended"]
    set_spec(world, suspend=False)
    world.now = "2026-01-01T01:00:00Z"
    world.settle()
    assert world.names() == ["digits-0", "digits-1", "digits-2"]
    assert world.condition("Suspended") == ("False", "Resumed")
    assert (world.job["status"]["state"], world.job["status"]["startTime"]) == ("Forming", world.now)
    assert reasons(world) == ["Resumed", "Suspended"]


def test_the_rendezvous_goes_first_so_that_the_others_are_no_faults_to_it() -> None:
    world = running_world()
    set_spec(world, suspend=True)
    kinds = [type(action) for action in world.actions()]
    assert kinds.index(WriteStatus) < kinds.index(DeletePod), "what the end looks like is not to be counted"
    world.settle()
    assert [action.name for action in world.deleted] == ["digits-rendezvous-0"]
    assert plan(world.snapshot()).check_after_s == 10.0
    world.remove_pod("digits-rendezvous-0")
    world.settle()
    assert sorted(action.name for action in world.deleted[1:]) == ["digits-0", "digits-1", "digits-2"]
    assert not any(action.is_forced for action in world.deleted)
    assert "are ending" in suspension(world)["message"]
    end_all(world)
    world.settle()
    assert "has no pods" in suspension(world)["message"]
    assert world.actions() == ()


def suspension(world: World) -> dict[str, Any]:
    """Return the condition."""
    (found,) = (item for item in world.job["status"]["conditions"] if item["type"] == "Suspended")
    return dict(found)


def test_a_rendezvous_that_does_not_end_holds_the_suspension_up_for_seconds_only() -> None:
    world = running_world()
    set_spec(world, suspend=True)
    world.settle()
    uid = world.uid_of("digits-rendezvous-0")
    world.memory = dataclasses.replace(world.memory, deleting_for_s={uid: 10.0})
    world.settle()
    assert len(world.deleted) == 4


def test_a_suspended_job_says_nothing_of_pods_that_it_is_not_to_have() -> None:
    world = suspended_world()
    status = world.job["status"]
    assert (status["state"], status["replicas"]) == ("Suspended", 0)
    assert status["ranks"] == {"active": 0, "spare": 0, "lost": 0}
    for kind in ("PodsReady", "Running", "Recovering", "Degraded", "SparesExhausted"):
        assert world.condition(kind) == ("False", "Suspended")
    assert reasons(world) == ["Suspended"]


def test_what_a_rendezvous_says_while_its_pods_end_is_no_fault() -> None:
    world = running_world()
    set_spec(world, suspend=True)
    world.settle()
    before = world.num_status_writes
    world.report = dataclasses.replace(
        world.report or pytest.fail("no report"), phase=JobPhase.FAILED, recoveries=(a_recovery(),), revision=9
    )
    assert world.actions() == ()
    end_all(world)
    world.settle()
    end_all(world)
    world.settle()
    assert world.condition("Failed") == ("False", "NotFinished")
    assert world.num_status_writes == before + 1, "that all have ended"


def test_counters_numbers_and_history_outlive_a_suspension() -> None:
    world = running_world()
    words = {"restarts_by_rung": {"pod": 2}, "restarts_by_cause": {"exception": 2}, "recoveries": (a_recovery(2),)}
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], iteration=2, term=4, **words)
    set_spec(world, suspend=True)
    for _ in range(2):
        world.settle()
        end_all(world)
    world.settle()
    assert world.job["status"]["restarts"]["total"] == 2
    set_spec(world, suspend=False)
    world.settle()
    assert world.created[-4:] == ["digits-rendezvous-1", "digits-3", "digits-4", "digits-5"]
    environment = world.pods["digits-rendezvous-1"]["spec"]["containers"][0]["env"]
    (earlier,) = (item["value"] for item in environment if item["name"] == "UNBROKEN_EARLIER")
    told = wire.decode(earlier, Earlier)
    assert (told.term, told.iteration) == (4, 2)
    assert world.job["status"]["state"] == "Forming", "the old report counts no more"
    world.run_pods()
    world.rendezvous_says(
        JobPhase.RUNNING,
        ["digits-3", "digits-4"],
        ["digits-5"],
        iteration=3,
        term=5,
        restarts_by_rung={"pod": 1},
        restarts_by_cause={"exception": 1},
    )
    world.settle()
    status = world.job["status"]
    assert (status["state"], status["iteration"], status["restarts"]["total"]) == ("Running", 3, 3)
    assert len(status["history"]) == 1
    assert world.condition("Running") == ("True", "Training")


def test_a_job_that_is_resumed_early_starts_when_its_old_pods_have_ended() -> None:
    world = running_world()
    set_spec(world, suspend=True)
    world.settle()
    world.remove_pod("digits-rendezvous-0")
    world.settle()
    set_spec(world, suspend=False)
    world.settle()
    assert world.condition("Suspended") == ("True", "Suspended")
    assert "when the pods that it had have ended" in suspension(world)["message"]
    world.end_pod("digits-1", "Failed")
    world.remove_pod("digits-0")
    assert [action for action in world.actions() if isinstance(action, CreatePod)] == []
    end_all(world)
    world.settle()
    assert world.names() == ["digits-3", "digits-4", "digits-5"]


def test_failed_pods_stay_for_their_logs_while_a_job_is_suspended() -> None:
    world = running_world()
    world.end_pod("digits-2", "Failed")
    world.settle()
    set_spec(world, suspend=True)
    for _ in range(2):
        world.settle()
        end_all(world)
    world.settle()
    assert world.names() == ["digits-2"]
    assert "has no pods" in suspension(world)["message"]


def test_pods_of_a_suspended_job_on_a_dead_node_are_forced_away() -> None:
    world = running_world()
    set_spec(world, suspend=True)
    world.settle()
    world.remove_pod("digits-rendezvous-0")
    world.settle()
    world.nodes["a"]["status"]["conditions"][0]["status"] = "Unknown"
    uid = world.uid_of("digits-1")
    world.memory = dataclasses.replace(world.memory, deleting_for_s={uid: 30.0})
    assert DeletePod("digits-1", uid, "node a does not come back", is_forced=True) in world.actions()


@pytest.mark.parametrize("finalizers", [[], ["example.com/backup"]])
def test_a_deletion_that_broke_off_is_finished_unless_a_finalizer_holds_the_pod(finalizers: list[str]) -> None:
    world = running_world()
    set_spec(world, suspend=True)
    metadata = world.pods["digits-1"]["metadata"]
    metadata |= {"deletionTimestamp": world.now, "finalizers": finalizers}
    del world.pods["digits-1"]["spec"]["nodeName"]
    uid = world.uid_of("digits-1")

    def ended_after(seconds: float) -> list[DeletePod]:
        world.memory = dataclasses.replace(world.memory, deleting_for_s={uid: seconds})
        return [action for action in world.actions() if isinstance(action, DeletePod) and action.uid == uid]

    assert not ended_after(1.0)
    wanted = DeletePod("digits-1", uid, "its deletion was begun, and broke off", is_forced=True)
    assert ended_after(2.0) == ([] if finalizers else [wanted])


def test_a_job_that_is_over_cannot_be_suspended() -> None:
    world = running_world()
    world.rendezvous_says(JobPhase.COMPLETE, ["digits-0", "digits-1"], ["digits-2"])
    world.settle()
    set_spec(world, suspend=True)
    world.settle()
    assert world.job["status"]["state"] == "Complete"
    assert "Suspended" not in [item["type"] for item in world.job["status"]["conditions"]]


def test_a_job_that_does_not_complete_in_its_time_fails_and_its_pods_end() -> None:
    world = running_world(activeDeadlineSeconds=3600, cleanPodPolicy="None")
    assert world.job["status"]["startTime"] == "2026-01-01T00:00:00Z"
    world.now = "2026-01-01T00:59:00Z"
    decision = plan(world.snapshot())
    assert (decision.actions, decision.check_after_s) == ((), 60.0)
    world.now = "2026-01-01T01:00:00Z"
    world.settle()
    assert world.condition("Failed") == ("True", "DeadlineExceeded")
    assert world.condition("Running") == ("False", "DeadlineExceeded")
    assert world.job["status"]["completionTime"] == world.now
    assert sorted(action.name for action in world.deleted) == [
        "digits-0",
        "digits-1",
        "digits-2",
        "digits-rendezvous-0",
    ]
    world.report = dataclasses.replace(world.report or pytest.fail("no report"), recoveries=(a_recovery(),), revision=9)
    assert world.actions() == (), "the end of the pods is no fault"
    assert reasons(world) == ["DeadlineExceeded"]


def test_a_job_that_completes_at_its_deadline_is_complete() -> None:
    world = running_world(activeDeadlineSeconds=60)
    world.now = "2026-01-01T00:02:00Z"
    world.rendezvous_says(JobPhase.COMPLETE, ["digits-0", "digits-1"], ["digits-2"])
    world.settle()
    assert world.condition("Complete") == ("True", "AllRanksCompleted")
    assert world.condition("Failed") == ("False", "NotFinished")


def test_a_suspension_ends_the_count_of_the_deadline_and_resuming_begins_it_anew() -> None:
    world = suspended_world(activeDeadlineSeconds=60)
    world.now = "2026-01-01T02:00:00Z"
    assert plan(world.snapshot()).check_after_s is None
    assert world.actions() == ()
    set_spec(world, suspend=False)
    world.settle()
    assert world.job["status"]["startTime"] == "2026-01-01T02:00:00Z"
    assert plan(world.snapshot()).check_after_s == 60.0


def complete(world: World) -> None:
    """Let the job complete: one pod ends by itself, the others still run."""
    world.rendezvous_says(JobPhase.COMPLETE, ["digits-0", "digits-1"], ["digits-2"])
    world.end_pod("digits-0", "Succeeded")
    world.settle()


@pytest.mark.parametrize(
    ("policy", "at_once", "later"),
    [
        pytest.param("Running", [], ["digits-1", "digits-2"], id="those that run"),
        pytest.param("All", ["digits-0"], ["digits-0", "digits-1", "digits-2"], id="all"),
        pytest.param("None", [], [], id="none"),
    ],
)
def test_the_policy_says_which_pods_go_when_the_job_is_over(policy: str, at_once: list[str], later: list[str]) -> None:
    world = running_world(cleanPodPolicy=policy)
    complete(world)
    assert [action.name for action in world.deleted] == at_once
    assert plan(world.snapshot()).check_after_s == 60.0
    world.memory = dataclasses.replace(world.memory, finished_for_s=60.0)
    world.settle()
    names = [action.name for action in world.deleted if layout.RENDEZVOUS not in action.name]
    assert sorted(names) == later
    assert "digits-rendezvous-0" in [action.name for action in world.deleted]


def test_a_job_that_is_over_is_deleted_when_its_time_to_live_is_over() -> None:
    world = running_world(ttlSecondsAfterFinished=600)
    complete(world)
    for name in ("digits-1", "digits-2"):
        world.end_pod(name, "Succeeded")
    world.settle()
    world.now = "2026-01-01T00:04:00Z"
    decision = plan(world.snapshot())
    assert (decision.actions, decision.check_after_s) == ((), 360.0)
    world.now = "2026-01-01T00:10:00Z"
    (action,) = world.actions()
    assert isinstance(action, DeleteJob)
    assert (action.uid, action.resource_version) == ("uid-of-digits", "1")
    world.settle()
    assert "deletionTimestamp" in world.job["metadata"]


def test_a_time_to_live_of_zero_waits_for_the_pods_that_still_say_goodbye() -> None:
    world = running_world(ttlSecondsAfterFinished=0)
    complete(world)
    assert "deletionTimestamp" not in world.job["metadata"]
    for name in ("digits-1", "digits-2"):
        world.end_pod(name, "Succeeded")
    world.settle()
    assert "deletionTimestamp" in world.job["metadata"]
