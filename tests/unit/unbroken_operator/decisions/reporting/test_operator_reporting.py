"""Status, conditions and Events of a job."""

import copy
import dataclasses
import json
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_job, a_node, a_recovery, running_world

from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Earlier, OtherFault, RungUse
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Rung, WorkerPhase
from unbroken_operator.api.schema import structural_schema
from unbroken_operator.api.status_models import Status
from unbroken_operator.decisions.actions import PostEvent, WriteStatus
from unbroken_operator.decisions.lifecycle import SILENT_S
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.reporting.recovery_text import recovery_sentence
from unbroken_operator.decisions.reporting.status import status_patch
from unbroken_operator.decisions.snapshot import pod_view


def say(world: World, **fields: Any) -> None:
    """Let the rendezvous say that all is well, but for these fields."""
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], **fields)


def test_a_job_that_trains_says_so() -> None:
    world = running_world()
    status = world.job["status"]
    assert (status["state"], status["iteration"], status["observedGeneration"]) == ("Running", 0, 1)
    assert status["ranks"] == {"active": 4, "spare": 2, "lost": 0}
    assert status["replicas"] == 2
    conditions = {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}
    assert conditions == {
        "Admitted": ("True", "SpecAccepted"),
        "PodsReady": ("True", "PodsReady"),
        "Running": ("True", "Training"),
        "Recovering": ("False", "NothingToRecover"),
        "Degraded": ("False", "FullStrength"),
        "SparesExhausted": ("False", "SparesReady"),
        "Complete": ("False", "NotFinished"),
        "Failed": ("False", "NotFinished"),
    }
    assert world.events == {}


def test_the_written_status_is_what_the_schema_allows() -> None:
    world = running_world()
    say(world, recoveries=(a_recovery(),), restarts_by_rung={"pod": 1}, restarts_by_cause={"exception": 1}, ettr=0.9)
    world.settle()
    status = copy.deepcopy(world.job["status"])
    for condition in status["conditions"]:
        condition["lastTransitionTime"] = str(condition["lastTransitionTime"])
    Status.model_validate_json(json.dumps(status))


def test_what_is_unknown_of_a_recovery_is_left_out_since_an_old_api_server_refuses_empty_strings() -> None:
    world = running_world()
    say(world, recoveries=(dataclasses.replace(a_recovery(), domain="", detail="", rank=None),))
    world.settle()
    status = world.job["status"]
    unknown = {"domain", "detail", "rank"}
    assert unknown.isdisjoint(status["lastInterruption"])
    assert "" not in status["lastInterruption"].values()
    assert unknown.isdisjoint(status["lastRecovery"])


def test_a_recovery_is_told_once_with_culprit_cause_rung_and_seconds() -> None:
    world = running_world()
    running = a_recovery(ended_at="")
    say(world, recoveries=(running,))
    world.settle()
    assert world.condition("Recovering") == ("True", "Recovering")
    assert world.messages("Recovered") == []
    assert "lastRecovery" not in world.job["status"]
    say(world, recoveries=(a_recovery(),), iteration=1)
    world.settle()
    say(world, recoveries=(a_recovery(),), iteration=1, max_step=7)
    world.settle()
    assert world.messages("Recovered") == [
        "rank 3 (pod digits-1, node a, domain n1): exception: ValueError: boom; recovered by rung in-process in "
        "0.060 s (detect 0.010, stop 0.050), iteration 0 -> 1"
    ]
    assert world.job["status"]["lastRecovery"]["seconds"] == {"detect": 0.01, "stop": 0.05}


def test_an_in_process_recovery_costs_one_status_write_and_one_event() -> None:
    world = running_world()
    say(world, recoveries=(a_recovery(),), iteration=1)
    kinds = [type(action) for action in world.actions()]
    assert kinds == [PostEvent, WriteStatus]
    world.settle()
    assert world.actions() == ()


def test_a_small_change_of_ettr_alone_is_no_reason_to_write() -> None:
    world = running_world()
    say(world, ettr=0.91)
    world.settle()
    say(world, ettr=0.94)
    assert world.actions() == ()


def test_an_ettr_that_was_read_too_early_does_not_stay_for_ever() -> None:
    world = running_world()
    say(world, ettr=0.0)
    world.settle()
    say(world, ettr=0.8)
    world.settle()
    assert world.job["status"]["ettr"] == 0.8


def test_a_spare_whose_workers_still_start_is_not_ready() -> None:
    world = running_world()
    say(world)
    assert world.report is not None
    starting = dataclasses.replace(world.report.pods[-1], workers=(WorkerPhase.READY, WorkerPhase.STARTING))
    world.report = dataclasses.replace(world.report, pods=(*world.report.pods[:-1], starting))
    world.settle()
    assert world.condition("SparesExhausted") == ("True", "SparesExhausted")


def test_waiting_below_the_minimum_is_told_by_an_event() -> None:
    world = running_world()
    text = "waits for pods: 0 of 2 are there"
    world.rendezvous_says(JobPhase.INTERRUPTED, [], [], reason=Reason.BELOW_MINIMUM, message=text)
    world.settle()
    assert world.condition("Running") == ("False", "BelowMinimumReplicas")
    assert world.condition("Degraded") == ("True", "FewerRanks")
    assert world.messages("BelowMinimumReplicas") == [text]


def test_a_lost_pod_is_told_as_a_pod_and_phases_in_their_order() -> None:
    lost = a_recovery(
        rank=None,
        cause=Cause.POD_LEAVING,
        detail="",
        domain="a",
        rung=Rung.POD,
        replaced_by=("digits-2",),
        world_size_after=2,
        phase_s={"stop": 0.03, "enter": 0.01, "detect": 0.0},
    )
    assert recovery_sentence(lost) == (
        "pod digits-1 (node a): pod-leaving; recovered by rung pod in 0.040 s "
        "(detect 0.000, stop 0.030, enter 0.010), iteration 0 -> 1; digits-2 took over; 4 -> 2 ranks"
    )


def test_an_event_names_the_other_faults_of_a_recovery_and_who_took_over_from_whom() -> None:
    hung = OtherFault(Cause.HARD_TIMEOUT, 5, "digits-2", "did not leave for 10 s", taken_by="digits-4")
    both = a_recovery(cause=Cause.PROCESS_EXIT, rung=Rung.POD, replaced_by=("digits-4",), num_faults=4, others=(hung,))
    assert recovery_sentence(both).endswith(
        "iteration 0 -> 1; digits-4 took over from digits-2; and rank 5 of digits-2: hard-timeout (did not leave for "
        "10 s); and 2 more faults"
    )


def test_a_failed_pod_ends_by_its_own_container_rather_than_by_our_agent() -> None:
    def ended(name: str, code: int) -> dict[str, Any]:
        return {"name": name, "state": {"terminated": {"exitCode": code, "reason": "Error"}}}

    pod = {
        "metadata": {"name": "digits-1", "uid": "u"},
        "status": {
            "phase": "Failed",
            "initContainerStatuses": [ended("unbroken-install", 0), ended("unbroken-agent", 143)],
            "containerStatuses": [ended("trainer", 1)],
        },
    }
    assert pod_view(pod).end == "container trainer ended with exit code 1 Error"


def test_restarts_are_summed_over_coordinators() -> None:
    world = running_world()
    say(world, restarts_by_rung={"pod": 2}, restarts_by_cause={"pod-lost": 2}, term=1)
    world.settle()
    say(world, restarts_by_rung={"process": 1}, restarts_by_cause={"process-exit": 1}, term=2)
    world.settle()
    say(world, restarts_by_rung={"process": 3}, restarts_by_cause={"process-exit": 3}, term=2)
    world.settle()
    assert world.job["status"]["restarts"] == {
        "total": 5,
        "byRung": {"pod": 2, "process": 3},
        "byCause": {"pod-lost": 2, "process-exit": 3},
    }


def test_a_new_rendezvous_is_told_the_numbers_and_the_budget_that_earlier_ones_have_used() -> None:
    world = running_world()
    used = a_recovery(1, started_at="2026-01-01T00:01:00.000Z")
    say(world, recoveries=(used,), restarts_by_rung={"pod": 1}, restarts_by_cause={"pod-lost": 1}, term=3)
    world.settle()
    world.remove_pod("digits-rendezvous-0")
    world.job["spec"]["restart"] = {"uncountedCauses": ["pod-leaving"]}
    uses = ((Cause.EXCEPTION, RungUse(Rung.IN_PROCESS, 7.5)), (Cause.POD_LEAVING, RungUse(Rung.POD, 8.5)))
    world.memory = dataclasses.replace(world.memory, uses=uses)
    world.settle()
    (pod,) = [pod for pod in world.pods.values() if pod["metadata"]["name"] == "digits-rendezvous-1"]
    variables = {item["name"]: item.get("value", "") for item in pod["spec"]["containers"][0]["env"]}
    assert wire.decode(variables["UNBROKEN_EARLIER"], Earlier) == Earlier(
        term=3, iteration=1, uses=(RungUse(Rung.IN_PROCESS, 7.5),)
    )


def test_the_first_rendezvous_is_told_of_nothing_earlier() -> None:
    world = World()
    world.settle()
    container = world.pods["digits-rendezvous-0"]["spec"]["containers"][0]
    assert "UNBROKEN_EARLIER" not in {item["name"] for item in container["env"]}


def test_the_history_keeps_the_last_recoveries_of_all_coordinators() -> None:
    world = running_world()
    first = tuple(a_recovery(number, started_at=f"2026-01-01T00:{number:02}:00Z") for number in range(1, 16))
    say(world, recoveries=first)
    world.settle()
    second = tuple(a_recovery(number, started_at=f"2026-01-01T01:{number:02}:00Z") for number in range(1, 11))
    say(world, recoveries=second, term=2)
    world.settle()
    history = [(item["term"], item["number"]) for item in world.job["status"]["history"]]
    assert history == [*((1, number) for number in range(6, 16)), *((2, number) for number in range(1, 11))]
    assert len(world.messages("Recovered")) == 25


def test_a_recovery_without_a_beginning_is_left_out_of_the_history() -> None:
    """A rendezvous whose image is the tenant's may send one: it ended each plan of its job with a KeyError."""
    world = running_world()
    say(world, recoveries=(a_recovery(1, started_at=""), a_recovery(2)))
    world.settle()
    say(world, recoveries=(a_recovery(1, started_at=""), a_recovery(2)), message="more")
    world.settle()
    assert [item["number"] for item in world.job["status"]["history"]] == [2]


def test_the_time_of_a_condition_moves_only_with_its_status() -> None:
    world = running_world()
    before = {item["type"]: item["lastTransitionTime"] for item in world.job["status"]["conditions"]}
    world.now = "2026-01-01T05:00:00Z"
    say(world, world_size=2, lost_ranks=2, message="2 of 4 ranks train")
    world.settle()
    after = {item["type"]: item["lastTransitionTime"] for item in world.job["status"]["conditions"]}
    assert {kind for kind in after if after[kind] != before[kind]} == {"Degraded"}
    assert world.condition("Degraded") == ("True", "FewerRanks")
    assert len(world.messages("FewerRanks")) == 1


def test_a_rendezvous_that_is_down_is_a_normal_state_and_training_goes_on() -> None:
    world = running_world()
    world.is_reachable = False
    assert world.actions() == (), "the first failures are not shown"
    world.unreachable_because = "rendezvous digits-rendezvous-0 at http://127.0.0.1:29600 did not answer within 10 s"
    world.settle()
    assert world.condition("Running") == ("Unknown", "WaitingForRendezvous")
    assert world.job["status"]["state"] == "Unknown"
    assert world.events == {}


def _message(world: World, kind: str) -> str:
    return str(next(item["message"] for item in world.job["status"]["conditions"] if item["type"] == kind))


def test_a_rendezvous_without_a_node_makes_the_job_unknown_with_why_and_what_was_known_last() -> None:
    world = running_world()
    say(world, message="4 ranks train")
    world.settle()
    world.pods["digits-rendezvous-0"]["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}],
    }
    # The worker follows no target: nobody tries, and nothing fails.
    world.is_reachable, world.unheard_for_s, world.heard_at = False, 1.0, "2026-01-01T00:00:00Z"
    decision = plan(world.snapshot())
    assert decision.check_after_s == pytest.approx(SILENT_S - 1.0), "nothing else would make it look again"
    world.settle()
    assert world.job["status"]["state"] == "Running", "a rendezvous may take a moment to start"
    world.unheard_for_s = SILENT_S
    world.settle()
    status = world.job["status"]
    assert status["state"] == "Unknown"
    assert "ranks" not in status, "a number would be read as one of now"
    for kind in ("Running", "Recovering", "Degraded", "SparesExhausted"):
        assert world.condition(kind) == ("Unknown", "WaitingForRendezvous")
    message = _message(world, "Running")
    assert "rendezvous pod digits-rendezvous-0: 0/3 nodes are available" in message
    assert "at 2026-01-01T00:00:00Z, 4 ranks trained in iteration 0" in message
    assert "Training goes on meanwhile" in message
    num_writes = world.num_status_writes
    world.unheard_for_s, world.now = 500.0, "2026-01-01T01:00:00Z"
    assert world.actions() == (), "the age is told by a time: it costs no writes"
    assert world.num_status_writes == num_writes
    world.is_reachable, world.unheard_for_s = True, 0.0
    world.settle()
    assert (world.job["status"]["state"], world.job["status"]["ranks"]["active"]) == ("Running", 4)
    assert world.condition("Running")[0] == "True"


def _lacks_node(world: World, name: str) -> None:
    told = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    world.pods[name]["status"] = {"phase": "Pending", "conditions": [told]}


def test_a_new_job_says_what_keeps_its_pods_away_as_long_as_its_rendezvous_has_no_node_either() -> None:
    """Before, it said for ever what was true before its pods were made: there is no rendezvous pod, wait."""
    world = World()
    world.settle()
    assert _message(world, "Running") == "rendezvous pod digits-rendezvous-0 is starting"
    _lacks_node(world, "digits-rendezvous-0")
    world.settle()
    assert world.condition("Running") == ("False", "PodsUnschedulable")
    assert _message(world, "Running") == _message(world, "PodsReady")
    world.refuse("digits-0", "pods are forbidden: exceeded quota")
    world.settle()
    assert world.condition("Running") == ("False", "WriteRefused")
    assert world.job["status"]["state"] == "Forming"


def test_a_job_that_starts_again_after_its_suspension_says_what_keeps_its_pods_away() -> None:
    world = running_world()
    world.job["spec"]["suspend"] = True
    world.settle()
    world.pods.clear()
    world.report, world.report_from, world.is_reachable = None, "", False
    world.settle()
    world.job["spec"]["suspend"] = False
    world.settle()
    for name in list(world.pods):
        _lacks_node(world, name)
    world.settle()
    assert world.condition("Running") == ("False", "PodsUnschedulable")


def test_training_does_not_go_on_without_a_rendezvous_once_an_active_pod_has_gone() -> None:
    world = running_world()
    world.is_reachable, world.unheard_for_s = False, SILENT_S
    world.settle()
    world.remove_pod("digits-1")
    world.settle()
    message = _message(world, "Running")
    assert "Since then digits-1 has gone: the training stands still until the rendezvous is back" in message


def test_a_new_operator_takes_what_is_stored_for_true_only_until_the_rendezvous_should_have_answered() -> None:
    world = running_world()
    world.report, world.report_from, world.is_reachable = None, "", False
    world.settle()
    assert world.job["status"]["state"] == "Running"
    world.unheard_for_s = SILENT_S
    world.settle()
    assert world.job["status"]["state"] == "Unknown"
    assert "This operator has not heard from it" in _message(world, "Running")


def _forget(world: World) -> None:
    """Let another operator take over, which has not heard of the job."""
    world.report, world.report_from, world.is_reachable, world.heard_at = None, "", False, ""


def _states(world: World) -> list[tuple[str, str, str]]:
    """Return state, Running and its message after each write, until nothing is left to do."""
    seen = []
    while actions := world.actions():
        for action in actions:
            world.apply(action)
            if isinstance(action, WriteStatus):
                status, _ = world.condition("Running")
                seen.append((world.job["status"]["state"], status, _message(world, "Running").partition(".")[0]))
    return seen


def test_a_new_operator_that_finds_no_rendezvous_says_from_its_first_write_on_that_nobody_knows() -> None:
    """Before, it said for seconds: NOT TRAINING, state Running."""
    world = running_world()
    _forget(world)
    world.remove_pod("digits-rendezvous-0")
    assert _states(world) == [
        ("Unknown", "Unknown", "there is no rendezvous pod at the moment"),
        ("Unknown", "Unknown", "rendezvous pod digits-rendezvous-1 is starting"),
    ]
    assert "Training may go on meanwhile" in _message(world, "Running"), "it may have lost pods before"
    _lacks_node(world, "digits-rendezvous-1")
    assert _states(world) == [("Unknown", "Unknown", "rendezvous pod digits-rendezvous-1: 0/3 nodes are available")]


def test_the_next_rendezvous_says_what_keeps_it_when_the_one_before_has_gone() -> None:
    """All nodes are cordoned: it was made to stand by. Before, the status said that there was no rendezvous pod."""
    world = running_world()
    world.nodes["a"]["spec"] = {"unschedulable": True}
    world.settle()
    for name in ("digits-rendezvous-1", "digits-3"):
        _lacks_node(world, name)
    world.settle()
    _forget(world)
    world.remove_pod("digits-rendezvous-0")
    (seen,) = _states(world)
    assert seen == ("Unknown", "Unknown", "rendezvous pod digits-rendezvous-1: 0/3 nodes are available")
    assert "the rendezvous pod digits-rendezvous-1 waits for a node, as 1 training pod does" in _message(
        world, "PodsReady"
    )


def test_a_new_rendezvous_that_goes_again_before_it_knew_the_ranks_is_no_new_start_either() -> None:
    """Before, the job was Forming from then on, and nothing said any more that it may train."""
    world = running_world()
    world.rendezvous_says(JobPhase.FORMING, [], [], term=2, message="0 of 2 pods are there")
    world.heard_at = "2026-01-01T00:00:00Z"
    world.settle()
    world.is_reachable = False
    world.settle()
    assert world.job["status"]["state"] == "Unknown"
    world.remove_pod("digits-rendezvous-0")
    world.settle()
    assert world.job["status"]["state"] == "Unknown"
    assert "at 2026-01-01T00:00:00Z, it waited for the pods" in _message(world, "Running")


def test_a_new_operator_takes_what_is_stored_for_true_while_the_node_of_the_rendezvous_is_lost() -> None:
    world = running_world()
    before = world.condition("Running")
    _forget(world)
    world.nodes["a"] = a_node("a", is_ready=False, rack="r1", nvlink="n1")
    world.settle()
    assert (world.job["status"]["state"], world.condition("Running")) == ("Running", before)


def test_a_new_rendezvous_that_does_not_know_the_ranks_yet_is_no_new_start() -> None:
    world = running_world()
    say(world, iteration=3)
    world.settle()
    forming = {"iteration": -1, "world_size": 0, "lost_ranks": 4, "term": 2, "message": "0 of 2 pods are there"}
    world.rendezvous_says(JobPhase.FORMING, [], [], **forming)
    world.settle()
    status = world.job["status"]
    assert (status["state"], status["iteration"], status.get("ranks")) == ("Unknown", 3, None)
    assert "a new rendezvous waits for the pods: 0 of 2 pods are there" in _message(world, "Running")
    assert world.condition("Degraded")[0] == "Unknown", "nobody knows that ranks are lost"
    say(world, iteration=3, term=2)
    world.settle()
    assert world.job["status"]["state"] == "Running"


def test_a_job_that_has_not_started_has_lost_nothing() -> None:
    world = World()
    world.settle()
    world.rendezvous_says(JobPhase.FORMING, [], [], iteration=-1, world_size=0, lost_ranks=8)
    world.settle()
    assert world.condition("Degraded")[0] == "False"
    assert "lost" not in _message(world, "Degraded")
    assert world.job["status"]["state"] == "Forming"


def test_spares_that_run_out_are_told_with_what_would_help() -> None:
    world = running_world()
    world.end_pod("digits-2", "Failed")
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], [])
    world.settle()
    assert world.condition("SparesExhausted") == ("True", "SparesExhausted")
    (message,) = world.messages("SparesExhausted")
    assert "0 spare pods are ready, 1 wanted" in message
    assert "would help" in message


def test_pods_that_wait_for_nodes_say_how_many_and_what_no_node_has() -> None:
    job = a_job()
    job["spec"]["template"]["spec"] |= {"nodeSelector": {"pool": "gpu"}}
    world = World(job)
    world.settle()
    world.run_pods()
    for name in ("digits-0", "digits-2"):
        told = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
        world.pods[name]["status"] = {"phase": "Pending", "conditions": [told]}
    world.settle()
    assert world.condition("PodsReady") == ("False", "PodsUnschedulable")
    (message,) = world.messages("PodsUnschedulable")
    assert message == (
        "1 of 3 training pods run; 2 wait for nodes (digits-0, digits-2): 0/1 nodes are available; "
        "no node has the label pool=gpu (seen none)"
    )


def test_pods_that_wait_for_their_scheduling_gates_are_no_fault_of_the_nodes() -> None:
    """A queue holds them back: that is ordinary, no Event, and goes without a trace."""
    world = World()
    world.settle()
    world.run_pods()
    for name in ("digits-0", "digits-2"):
        told = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "blocked"}
        world.pods[name]["spec"]["schedulingGates"] = [{"name": "example.com/queue"}]
        world.pods[name]["status"] = {"phase": "Pending", "conditions": [told]}
    world.settle()
    assert world.condition("PodsReady") == ("False", "PodsGated")
    conditions = {item["type"]: item for item in world.job["status"]["conditions"]}
    assert conditions["PodsReady"]["message"] == (
        "1 of 3 training pods run; digits-0, digits-2: held back by scheduling gate example.com/queue"
    )
    assert world.messages("PodsGated") == []
    for name in ("digits-0", "digits-2"):
        del world.pods[name]["spec"]["schedulingGates"]
    world.run_pods()
    world.settle()
    assert world.condition("PodsReady") == ("True", "PodsReady")


def test_a_rendezvous_that_waits_for_a_node_is_not_explained_by_the_template_of_the_others() -> None:
    job = a_job()
    job["spec"]["template"]["spec"] |= {"nodeSelector": {"pool": "gpu"}}
    world = World(job)
    world.settle()
    told = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    world.pods["digits-rendezvous-0"]["status"] = {"phase": "Pending", "conditions": [told]}
    world.settle()
    (message,) = world.messages("PodsUnschedulable")
    assert "the rendezvous pod digits-rendezvous-0 waits for a node: 0/1 nodes are available" in message
    assert "pool" not in message


@pytest.mark.parametrize(
    ("status", "reason", "part"),
    [
        pytest.param(
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]},
            "PodsUnschedulable",
            "0/3 nodes are available",
            id="unschedulable",
        ),
        pytest.param(
            {
                "containerStatuses": [
                    {"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
                ]
            },
            "ImagePullFailed",
            "container trainer: ErrImagePull: no such image",
            id="image",
        ),
        pytest.param(
            {
                "initContainerStatuses": [
                    {"name": "unbroken-agent", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
                ]
            },
            "ContainerNotStarted",
            "container unbroken-agent: CrashLoopBackOff",
            id="crash loop",
        ),
    ],
)
def test_a_pod_that_does_not_come_up_is_shown_in_conditions_and_one_event(
    status: dict[str, Any], reason: str, part: str
) -> None:
    world = World()
    world.settle()
    for name in world.names():
        world.pods[name]["status"] = {"phase": "Pending", **status}
    world.settle()
    world.pods["digits-0"]["status"] = {"phase": "Running"}
    world.settle()
    assert world.condition("PodsReady") == ("False", reason)
    assert world.condition("Running") == ("False", reason)
    (message,) = world.messages(reason)
    assert part in message
    world.unreachable_because = "the rendezvous does not answer"
    world.settle()
    assert world.condition("Running") == ("False", reason)


def test_how_a_failed_pod_ended_is_read_from_its_containers() -> None:
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 127, "reason": "Error", "message": "no python3"}}}
    pod = {
        "metadata": {"name": "digits-3", "uid": "u"},
        "status": {"phase": "Failed", "containerStatuses": [ended]},
    }
    assert pod_view(pod).end == "container trainer ended with exit code 127 Error no python3"


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        pytest.param({"a": 1}, {"a": 1}, {}, id="nothing"),
        pytest.param({"a": 1, "b": 2}, {"a": 1}, {"b": None}, id="removed"),
        pytest.param({"a": {"x": 1, "y": 2}}, {"a": {"x": 1}}, {"a": {"y": None}}, id="removed inside"),
        pytest.param({"a": [1]}, {"a": [1, 2]}, {"a": [1, 2]}, id="lists are replaced"),
        pytest.param({"ettr": 0.5}, {"ettr": 0.54}, {}, id="ettr alone"),
        pytest.param({"ettr": 0.5, "a": 1}, {"ettr": 0.6, "a": 2}, {"ettr": 0.6, "a": 2}, id="ettr with another"),
    ],
)
def test_the_patch_holds_only_what_changed(before: Any, after: Any, patch: Any) -> None:
    assert status_patch(before, after) == patch


def test_the_status_schema_has_no_defaults_and_documents_every_field() -> None:
    properties = structural_schema(Status)["properties"]
    assert [name for name, child in properties.items() if not child.get("description")] == []


def test_the_rung_of_the_report_reaches_the_record() -> None:
    world = running_world()
    say(world, recoveries=(dataclasses.replace(a_recovery(), rung=Rung.POD, replaced_by=("digits-2",)),))
    world.settle()
    assert world.job["status"]["lastRecovery"]["rung"] == "pod"
    assert "digits-2 took over" in world.messages("Recovered")[0]


def test_a_pod_that_the_rendezvous_refuses_is_told_once_and_taken_back() -> None:
    world = World()
    world.settle()
    world.run_pods()
    why = "digits-2: ranksPerPod: want 2 workers in each pod of the job, got 4 in pod digits-2"
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], [], refused=(why,))
    world.settle()
    assert world.condition("PodsReady") == ("False", "PodRefused")
    (event,) = [item for item in world.events.values() if item["reason"] == "PodRefused"]
    assert event["message"] == f"3 of 3 training pods run; the rendezvous refuses {why}"
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"])
    world.settle()
    assert world.condition("PodsReady") == ("True", "PodsReady")


def test_what_workers_say_is_one_printable_bounded_line_in_conditions_and_events() -> None:
    world = running_world()
    ugly = "\x1b[2Jboom\r\nFAKE \u202etxt" + "\x00" * 2000
    say(world, recoveries=(a_recovery(detail=ugly, ended_at=""),))
    world.settle()
    say(world, recoveries=(a_recovery(detail=ugly),), message=ugly)
    world.settle()
    texts = [item["message"] for item in (*world.job["status"]["conditions"], *world.events.values())]
    assert any("\\x1b[2Jboom\\r\\nFAKE \\u202etxt" in text for text in texts)
    assert all(text.isprintable() and len(text) <= 1000 for text in texts), texts


def test_a_rendezvous_without_a_node_is_no_training_pod() -> None:
    world = World()
    world.settle()
    told = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    for pod in world.pods.values():
        pod["status"] = {"phase": "Pending", "conditions": [told]}
    world.settle()
    (found,) = (item for item in world.job["status"]["conditions"] if item["type"] == "PodsReady")
    assert found["message"].startswith(
        "0 of 3 training pods run; the rendezvous pod digits-rendezvous-0 waits for a node, as 3 training pods do: 0/1"
    )
