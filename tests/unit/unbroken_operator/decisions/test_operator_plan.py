"""Decisions of the operator, from one snapshot to actions."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import LAYERS, World, a_job, a_node, a_recovery, running_world

from unbroken_core.vocabulary.reasons import Cause, JobPhase, Role
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import CreatePod, DeletePod, PushObservation, WriteStatus
from unbroken_operator.decisions.snapshot import PlanMemory, SecretView


def test_a_new_job_gets_its_objects_at_once_and_then_nothing_more() -> None:
    world = World()
    rounds = world.settle()
    assert rounds <= 2
    assert world.names() == ["digits-0", "digits-1", "digits-2"]
    assert world.names(layout.RENDEZVOUS) == ["digits-rendezvous-0"]
    roles = [world.pods[name]["metadata"]["labels"][layout.ROLE_LABEL] for name in world.names()]
    assert roles == ["active", "active", "spare"]
    assert world.secret is not None
    assert world.service is not None
    assert world.actions() == ()


def test_ordinals_are_reserved_before_the_pods_that_bear_them() -> None:
    actions = World().actions()
    kinds = [type(action) for action in actions]
    assert kinds.index(WriteStatus) < kinds.index(CreatePod)


def fresh(world: World) -> None:
    """The job was just created."""


def running(world: World) -> None:
    """The job trains."""
    world.settle()
    world.run_pods()
    world.settle()  # Spares of a job with layers are made once the active pods have nodes.
    world.run_pods()
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"])


def pod_failed(world: World) -> None:
    """An active pod failed and the spare was promoted."""
    running(world)
    world.settle()
    world.end_pod("digits-1", "Failed")
    world.rendezvous_says(
        JobPhase.RUNNING, ["digits-0", "digits-2"], [], iteration=1, recoveries=(a_recovery(replaced_by=("digits-2",)),)
    )


def node_died(world: World) -> None:
    """The node of a pod died, and the rendezvous has given the pod up."""
    world.nodes["b"] = a_node("b", rack="r2", nvlink="n2")
    running(world)
    world.settle()
    world.pods["digits-0"]["spec"]["nodeName"] = "b"
    world.nodes["b"] = a_node("b", is_ready=False)
    world.report = dataclasses.replace(
        world.report or pytest.fail("no report"),
        phase=JobPhase.INTERRUPTED,
        pods=tuple(
            dataclasses.replace(pod, is_connected=pod.pod != "digits-0")
            for pod in (world.report or pytest.fail("no report")).pods
        ),
    )


def scaled(world: World) -> None:
    """The user asked for more active pods."""
    running(world)
    world.settle()
    world.job["spec"]["replicas"] = 4
    world.job["metadata"]["generation"] = 2


def broken(world: World) -> None:
    """The user broke the spec."""
    running(world)
    world.settle()
    world.job["spec"]["minReplicas"] = 9
    world.job["metadata"]["generation"] = 2


def completed(world: World) -> None:
    """The job is complete."""
    running(world)
    world.settle()
    world.rendezvous_says(JobPhase.COMPLETE, ["digits-0", "digits-1"], ["digits-2"])
    for name in world.names():
        world.end_pod(name, "Succeeded")


def suspended(world: World) -> None:
    """The user suspends the job."""
    running(world)
    world.settle()
    world.job["spec"]["suspend"] = True
    world.job["metadata"]["generation"] = 2


def resumed(world: World) -> None:
    """The job is resumed."""
    suspended(world)
    world.settle()
    for name in (*world.names(), *world.names(layout.RENDEZVOUS)):
        world.remove_pod(name)
    world.settle()
    world.job["spec"]["suspend"] = False
    world.job["metadata"]["generation"] = 3


def late(world: World) -> None:
    """The job's time is over."""
    running(world)
    world.settle()
    world.job["spec"]["activeDeadlineSeconds"] = 60
    world.now = "2026-01-01T00:01:00Z"


def rolled(world: World) -> None:
    """The template is changed, and pods are to follow it."""
    running(world)
    world.settle()
    world.job["spec"]["updatePolicy"] = "Rolling"
    world.job["spec"]["template"]["spec"]["containers"][0]["image"] = "torch:3"
    world.job["metadata"]["generation"] = 2


def mended(world: World) -> None:
    """The template is changed before its pods have started."""
    world.settle()
    world.job["spec"]["template"]["spec"]["containers"][0]["image"] = "torch:3"
    world.job["metadata"]["generation"] = 2


SITUATIONS = [
    fresh,
    running,
    pod_failed,
    node_died,
    scaled,
    broken,
    completed,
    suspended,
    resumed,
    late,
    rolled,
    mended,
]


def outcome(world: World) -> Any:
    """Return everything that must not depend on where the operator was interrupted, ordinals and uids aside."""
    pods = sorted(
        (
            pod["metadata"]["labels"][layout.COMPONENT_LABEL],
            pod["status"]["phase"],
            "deletionTimestamp" in pod["metadata"],
            pod["metadata"]["labels"].get(layout.ROLE_LABEL, ""),
        )
        for pod in world.pods.values()
    )
    status = json.loads(re.sub(r"-rendezvous-\d+", "-rendezvous-N", json.dumps(world.job["status"])))
    for key in ("nextPodOrdinal", "nextRendezvousOrdinal"):
        status.pop(key, None)
    return pods, status, sorted(world.events), world.secret is not None, world.service is not None


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda item: item.__doc__)
def test_stopping_after_any_action_and_planning_anew_ends_in_the_same_state(
    situation: Callable[[World], None],
) -> None:
    straight = World(a_job(topology={"layers": LAYERS}))
    situation(straight)
    start = copy.deepcopy(straight)
    num_actions = len(straight.actions())
    assert num_actions > 0
    straight.settle()
    for stop_after in range(num_actions + 1):
        world = copy.deepcopy(start)
        for action in world.actions()[:stop_after]:
            world.apply(action)
        world.settle()
        assert outcome(world) == outcome(straight), f"stopped after {stop_after} actions"
        assert world.actions() == ()


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda item: item.__doc__)
def test_doing_every_action_twice_is_doing_it_once(situation: Callable[[World], None]) -> None:
    once = World(a_job(topology={"layers": LAYERS}))
    situation(once)
    twice = copy.deepcopy(once)
    once.settle()
    for _ in range(10):
        actions = twice.actions()
        for action in actions:
            twice.apply(action)
            twice.apply(action)
    assert outcome(twice) == outcome(once)
    assert twice.names() == once.names()
    assert twice.actions() == ()


def test_a_failed_pod_is_replaced_by_a_spare_with_a_new_ordinal() -> None:
    world = running_world()
    pod_failed(world)
    world.settle()
    assert world.created[-1] == "digits-3"
    assert world.pods["digits-3"]["metadata"]["labels"][layout.ROLE_LABEL] == "spare"
    assert world.pods["digits-2"]["metadata"]["labels"][layout.ROLE_LABEL] == "active"
    assert "digits-1" in world.pods, "failed pods stay for their logs"


def test_an_ordinal_is_never_used_again_when_the_status_is_stale() -> None:
    world = running_world()
    world.job["status"]["nextPodOrdinal"] = 0
    world.end_pod("digits-2", "Failed")
    world.settle()
    assert world.created[-1] == "digits-3"


@pytest.mark.parametrize("state", ["Running", "Unknown", "Forming", "Complete", "Failed"])
def test_a_job_that_is_being_deleted_says_so_and_nothing_else_is_done(state: str) -> None:
    world = running_world()
    world.job["status"]["state"] = state
    world.job["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["example.com/audit"]}
    world.end_pod("digits-1", "Failed")
    before = world.names()
    world.settle()
    is_over = state in ("Complete", "Failed")
    assert world.job["status"]["state"] == (state if is_over else "Deleting")
    assert ("ranks" in world.job["status"]) is is_over
    assert world.names() == before


def test_refused_pods_use_up_no_ordinals_and_all_pods_stay_accounted_for() -> None:
    world = running_world()
    # A quota kept the job small for a while: 1 was refused beside 0 and 2, and so were all after 2, again and again.
    world.remove_pod("digits-1")
    world.job["status"]["nextPodOrdinal"] = 90
    world.memory = dataclasses.replace(world.memory, unused_ordinals=frozenset({1, *range(3, 90)}))
    world.settle()
    assert world.created[-1] == "digits-3"
    assert world.job["status"]["nextPodOrdinal"] == 90, "not lower: this operator alone knows which are free"
    world.memory = dataclasses.replace(world.memory, unused_ordinals=frozenset({1, *range(4, 90)}))
    world.settle()
    assert world.pushed[-1][2].is_accounted
    # Another operator has reserved more since: what is reserved counts.
    world.job["status"]["nextPodOrdinal"] = 120
    world.end_pod("digits-0", "Failed")
    world.settle()
    assert world.created[-1] == "digits-120"


def test_an_ordinal_is_never_used_again_when_its_pod_is_gone() -> None:
    world = running_world()
    for ordinal in (2, 3, 4):
        world.remove_pod(f"digits-{ordinal}")
        world.settle()
        world.run_pods()
    assert world.created[-3:] == ["digits-3", "digits-4", "digits-5"]


@pytest.mark.parametrize(
    ("kill", "gone"),
    [
        pytest.param(lambda world: world.end_pod("digits-1", "Failed"), Cause.POD_LOST, id="failed"),
        pytest.param(
            lambda world: world.pods["digits-1"]["metadata"].update(deletionTimestamp=world.now),
            Cause.POD_LEAVING,
            id="being deleted",
        ),
    ],
)
def test_the_rendezvous_hears_first_that_a_pod_goes(kill: Callable[[World], None], gone: Cause) -> None:
    world = running_world()
    uid = world.uid_of("digits-1")
    kill(world)
    first = world.actions()[0]
    assert isinstance(first, PushObservation)
    assert first.observation.pods[uid].gone is gone


def test_a_dead_node_loses_its_pods_only_when_their_agents_are_silent_too() -> None:
    world = running_world()
    world.nodes["a"] = a_node("a", is_ready=False)
    assert not [action for action in world.actions() if isinstance(action, CreatePod | DeletePod)]
    node_died(world)
    world.nodes["a"] = a_node("a")
    actions = world.actions()
    push = actions[0]
    assert isinstance(push, PushObservation)
    assert push.observation.pods[world.uid_of("digits-0")].gone is Cause.NODE_LOST
    assert [action.manifest["metadata"]["name"] for action in actions if isinstance(action, CreatePod)] == ["digits-3"]


def test_a_pod_that_is_stuck_on_a_dead_node_is_forced_away_after_the_grace() -> None:
    world = running_world()
    node_died(world)
    world.settle()
    uid = world.uid_of("digits-0")
    assert "deletionTimestamp" in world.pods["digits-0"]["metadata"]
    assert not any(isinstance(action, DeletePod) for action in world.actions())
    world.memory = dataclasses.replace(world.memory, deleting_for_s={uid: 30.0})
    assert DeletePod("digits-0", uid, "node b does not come back", is_forced=True) in world.actions()


def test_the_topology_is_stamped_on_pods_and_sent_to_the_rendezvous() -> None:
    world = running_world(topology={"layers": LAYERS})
    annotation = world.pods["digits-0"]["metadata"]["annotations"][layout.TOPOLOGY_ANNOTATION]
    assert json.loads(annotation) == {"rack": "r1", "nvlink": "n1"}
    observation = world.pushed[-1][2]
    assert observation.pods[world.uid_of("digits-0")].domains == ("r1", "n1")
    assert observation.pods[world.uid_of("digits-2")].role is Role.SPARE


def test_the_rendezvous_is_told_which_pods_the_cluster_has_not_started() -> None:
    world = running_world()
    world.pods["digits-2"]["status"]["phase"] = "Pending"
    world.settle()
    told = {pod.pod: pod.is_waiting for pod in world.pushed[-1][2].pods.values()}
    assert told == {"digits-0": False, "digits-1": False, "digits-2": True}


def test_the_observation_is_sent_again_to_a_new_term_only() -> None:
    world = running_world()
    number = len(world.pushed)
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"])
    world.settle()
    assert len(world.pushed) == number
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], term=2)
    world.settle()
    assert len(world.pushed) == number + 1


def test_a_label_that_a_node_lacks_is_an_empty_domain_a_condition_and_one_event() -> None:
    world = World(a_job(topology={"layers": LAYERS}), nodes=[a_node("a", rack="r1")])
    running(world)
    world.settle()
    assert world.condition("TopologyKnown") == ("False", "TopologyLabelMissing")
    (event,) = [item for item in world.events.values() if item["reason"] == "TopologyLabelMissing"]
    assert "label example.com/nvlink on node a" in event["message"]
    assert world.pushed[-1][2].pods[world.uid_of("digits-0")].domains == ("r1", "")


def test_a_domain_that_lies_in_two_is_a_condition_and_one_event_until_the_labels_are_right_again() -> None:
    nodes = [a_node("a", rack="r1", nvlink="n1"), a_node("b", rack="r2", nvlink="n1")]
    world = World(a_job(topology={"layers": LAYERS}), nodes=nodes)
    running(world)
    world.pods["digits-1"]["spec"]["nodeName"] = "b"
    world.settle()
    assert world.condition("TopologyKnown") == ("False", "TopologyLabelsContradict")
    (event,) = [item for item in world.events.values() if item["reason"] == "TopologyLabelsContradict"]
    assert event["message"] == (
        "contradicting: example.com/nvlink=n1: must be in one rack, but has example.com/rack=r1 on node a and "
        "example.com/rack=r2 on node b. Each of them counts as two domains"
    )
    observed = world.pushed[-1][2].pods
    assert [observed[world.uid_of(name)].domains for name in ("digits-0", "digits-1")] == [("r1", "n1"), ("r2", "n1")]
    assert world.actions() == ()

    world.nodes["b"] = a_node("b", rack="r2", nvlink="n2")
    world.settle()
    assert world.condition("TopologyKnown") == ("True", "TopologyKnown")
    assert world.pushed[-1][2].pods[world.uid_of("digits-1")].domains == ("r2", "n2")
    assert len([item for item in world.events.values() if item["reason"].startswith("TopologyLabel")]) == 1


def test_a_missing_label_is_no_contradiction_and_both_are_told_together() -> None:
    nodes = [a_node("a", rack="r1", nvlink="n1"), a_node("b", nvlink="n1"), a_node("c", rack="r2", nvlink="n1")]
    world = World(a_job(topology={"layers": LAYERS}), nodes=nodes)
    running(world)
    world.pods["digits-1"]["spec"]["nodeName"] = "b"
    world.settle()
    assert world.condition("TopologyKnown") == ("False", "TopologyLabelMissing")
    message = world.job["status"]["conditions"][2]["message"]
    assert message == "missing: label example.com/rack on node b. Their pods count as one domain without a name"
    world.pods["digits-2"]["spec"]["nodeName"] = "c"
    world.settle()
    message = world.job["status"]["conditions"][2]["message"]
    assert message.startswith("missing: label example.com/rack on node b. ")
    assert "; contradicting: example.com/nvlink=n1: must be in one rack, but has " in message


def test_the_node_of_a_pod_that_has_failed_says_nothing_about_the_topology() -> None:
    world = World(a_job(topology={"layers": LAYERS}), nodes=[a_node("a", rack="r1", nvlink="n1"), a_node("b")])
    running(world)
    world.pods["digits-1"]["spec"]["nodeName"] = "b"
    world.settle()
    assert world.condition("TopologyKnown") == ("False", "TopologyLabelMissing")
    world.end_pod("digits-1", "Failed")
    world.settle()
    assert world.condition("TopologyKnown") == ("True", "TopologyKnown")


def test_scaling_up_creates_active_pods_and_a_rendezvous_with_the_new_settings() -> None:
    world = running_world()
    scaled(world)
    world.settle()
    assert world.names() == ["digits-0", "digits-1", "digits-2", "digits-3", "digits-4"]
    assert world.created[-3:] == ["digits-3", "digits-4", "digits-rendezvous-1"]
    assert "deletionTimestamp" not in world.pods["digits-rendezvous-0"]["metadata"], "until the next one can lead"


def test_scaling_down_deletes_spares_and_never_a_pod_that_trains() -> None:
    world = running_world()
    world.job["spec"]["replicas"] = 1
    world.job["spec"]["spares"] = {"count": 0}
    world.settle()
    assert [action.name for action in world.deleted if layout.RENDEZVOUS not in action.name] == ["digits-2"]
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0"], ["digits-1"])
    world.settle()
    assert [action.name for action in world.deleted if layout.RENDEZVOUS not in action.name] == ["digits-2", "digits-1"]


@pytest.mark.parametrize("what", ["not heard of lately", "never heard of", "taken over"])
def test_scaling_down_deletes_no_pod_while_nobody_knows_which_ones_train(what: str) -> None:
    """The last report may be minutes old, and a spare of then have a rank now."""
    world = running_world()
    world.job["spec"]["spares"] = {"count": 0}
    world.is_reachable = what == "taken over"
    if what == "never heard of":
        world.report, world.report_from = None, ""
    if what == "taken over":
        world.rendezvous_says(JobPhase.FORMING, [], [], term=2)
    assert [action for action in world.actions() if isinstance(action, DeletePod)] == []
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-2"], ["digits-1"], term=2)
    deleted = [action.name for action in world.actions() if isinstance(action, DeletePod)]
    assert deleted == ["digits-1"]


def test_no_pod_is_too_many_while_a_rendezvous_that_runs_has_not_been_heard() -> None:
    """It may have begun the job with this very pod, while the operator saw nothing of it."""
    world = running_world()
    world.job["status"] = {}
    world.job["spec"]["spares"] = {"count": 0}
    world.report, world.report_from, world.is_reachable = None, "", False
    assert [action for action in world.actions() if isinstance(action, DeletePod)] == []
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-2"], ["digits-1"])
    assert [action.name for action in world.actions() if isinstance(action, DeletePod)] == ["digits-1"]


def test_pods_that_succeed_before_the_report_says_complete_are_not_replaced() -> None:
    world = running_world()
    world.end_pod("digits-0", "Succeeded")
    assert not [action for action in world.actions() if isinstance(action, CreatePod)]


def test_pods_that_ended_well_are_not_replaced_while_nobody_hears_the_rendezvous() -> None:
    """Each replacement would be told that the job is complete, end well, and be replaced."""
    world = running_world()
    assert world.report is not None
    agents_away = [
        dataclasses.replace(member, is_connected=False) for member in world.report.pods if member.pod != "digits-2"
    ]
    world.report = dataclasses.replace(world.report, pods=tuple(agents_away))
    world.is_reachable = False
    for name in ("digits-0", "digits-1", "digits-2"):
        world.end_pod(name, "Succeeded")
    assert not [action for action in world.actions() if isinstance(action, CreatePod)]
    world.is_reachable = True
    assert [action for action in world.actions() if isinstance(action, CreatePod)]


def test_no_pod_is_replaced_once_the_training_has_returned() -> None:
    world = running_world()
    world.rendezvous_says(JobPhase.ENDING, ["digits-0", "digits-1"], ["digits-2"])
    world.end_pod("digits-0", "Succeeded")
    world.end_pod("digits-1", "Failed")
    world.settle()
    assert world.names() == ["digits-0", "digits-1", "digits-2"]
    assert world.condition("Complete") == ("False", "NotFinished")


def test_pods_that_ended_well_while_the_rendezvous_was_away_are_told_to_the_next_one_and_not_replaced() -> None:
    world = running_world()
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 0}}}
    for name in ("digits-0", "digits-1"):
        world.end_pod(name, "Succeeded")
        world.pods[name]["status"]["containerStatuses"] = [ended]
    world.rendezvous_says(JobPhase.FORMING, [], [], term=2)
    created = [action.manifest["metadata"]["name"] for action in world.actions() if isinstance(action, CreatePod)]
    assert created == []
    world.settle()
    _, _, told = world.pushed[-1]
    assert {pod.pod: pod.is_ended for pod in told.pods.values()} == {
        "digits-0": True,
        "digits-1": True,
        "digits-2": False,
    }
    world.end_pod("digits-1", "Failed")
    assert [action for action in world.actions() if isinstance(action, CreatePod)], "that is no good end"


def test_a_complete_job_keeps_its_pods_and_loses_its_rendezvous_after_the_last_word() -> None:
    world = running_world()
    completed(world)
    first = world.actions()
    assert not any(isinstance(action, DeletePod) for action in first), "the outcome is recorded first"
    world.settle()
    assert world.condition("Complete") == ("True", "AllRanksCompleted")
    assert world.job["status"]["state"] == "Complete"
    assert world.names() == ["digits-0", "digits-1", "digits-2"]
    assert [action.name for action in world.deleted] == ["digits-rendezvous-0"]
    world.remove_pod("digits-rendezvous-0")
    world.remove_pod("digits-1")
    world.report = None
    assert world.actions() == ()


def test_pods_that_never_started_go_when_the_job_is_over() -> None:
    world = running_world()
    world.end_pod("digits-2", "Failed")
    world.settle()
    assert world.created[-1] == "digits-3"
    world.rendezvous_says(JobPhase.FAILED, ["digits-0", "digits-1"], [])
    world.settle()
    assert world.condition("Failed") == ("True", "RestartBudgetExhausted")
    assert "digits-3" not in world.pods


def test_a_running_job_is_repaired_under_its_last_sound_spec() -> None:
    world = running_world()
    broken(world)
    world.job["spec"]["replicas"] = 1
    world.settle()
    assert world.job["status"]["state"] == "Running"
    assert world.condition("Running")[0] == "True"
    assert world.condition("Admitted") == ("False", "InvalidSpec")
    (event,) = [item for item in world.events.values() if item["reason"] == "InvalidSpec"]
    told = "spec.minReplicas: want 1 to replicas (1), got 9; the spec before it stays in force"
    assert event["message"] == told
    world.end_pod("digits-2", "Failed")
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], [])
    world.settle()
    assert world.created[-1] == "digits-3", "the lost pod is replaced"
    assert "digits-1" in world.pods, "the refused number of replicas is not acted on"
    world.job["spec"] |= {"replicas": 2, "minReplicas": 1}
    world.job["metadata"]["generation"] = 3
    world.settle()
    assert world.condition("Admitted") == ("True", "SpecAccepted")


def test_a_job_that_never_had_a_sound_spec_has_no_pods() -> None:
    world = World(a_job(minReplicas=9))
    world.settle()
    assert (world.job["status"]["state"], world.created) == ("Invalid", [])
    (condition,) = [item for item in world.job["status"]["conditions"] if item["type"] == "Admitted"]
    assert condition["message"] == "spec.minReplicas: want 1 to replicas (2), got 9"


def test_an_operator_that_knows_no_sound_spec_touches_nothing_and_the_job_goes_on_after_the_mend() -> None:
    world = running_world()
    broken(world)
    world.memory = PlanMemory()  # Another operator leads now.
    world.settle()
    assert world.job["status"]["state"] == "Running", "it trains, whatever its spec says"
    assert world.condition("Admitted") == ("False", "InvalidSpec")
    (event,) = [item for item in world.events.values() if item["reason"] == "InvalidSpec"]
    meanwhile = "the job goes on as it is, and lost pods are not replaced meanwhile"
    assert event["message"] == f"spec.minReplicas: want 1 to replicas (2), got 9; {meanwhile}"
    world.end_pod("digits-2", "Failed")
    assert world.actions() == ()
    del world.job["spec"]["minReplicas"]
    world.job["metadata"]["generation"] = 3
    world.settle()
    assert world.condition("Admitted") == ("True", "SpecAccepted")
    assert world.created[-1] == "digits-3"


def test_a_secret_of_someone_else_is_shown_and_waited_for() -> None:
    world = World()
    world.secret = SecretView("digits-rendezvous", "other", "another-owner")
    world.settle()
    assert world.condition("Admitted") == ("False", "NameTaken")
    assert world.created == []
    world.secret = None
    world.settle()
    assert world.condition("Admitted") == ("True", "SpecAccepted")
    assert len(world.created) == 4


def test_pods_of_an_earlier_job_of_that_name_are_left_alone_and_their_ordinals_skipped() -> None:
    world = running_world()
    world.job = a_job()
    world.job["metadata"]["uid"] = "another"
    world.secret = world.service_object = world.report = None
    world.tokens = {}
    world.memory = PlanMemory()
    world.settle()
    assert world.deleted == []
    assert world.created[-3:] == ["digits-3", "digits-4", "digits-5"]


def test_pods_that_fail_before_they_are_ready_are_tried_again_slower_and_slower() -> None:
    world = World()
    world.settle()
    world.run_pods()
    world.end_pod("digits-0", "Failed")
    world.memory = dataclasses.replace(world.memory, num_early_failures=3, since_failure_s=5.0)
    world.settle()
    assert world.names() == ["digits-0", "digits-1", "digits-2"]
    assert world.condition("PodsReady") == ("False", "FailedBeforeReady")
    world.memory = dataclasses.replace(world.memory, since_failure_s=32.0)
    world.settle()
    assert world.created[-1] == "digits-3"


def test_a_refused_pod_is_shown_with_the_api_servers_words_and_tried_again_later() -> None:
    world = World()
    for action in world.actions():
        if not isinstance(action, CreatePod):
            world.apply(action)
    world.refuse("digits-0", "pods are forbidden: exceeded quota: gpus")
    world.settle()
    assert world.created == []
    assert world.condition("PodsReady") == ("False", "WriteRefused")
    (event,) = [item for item in world.events.values() if item["reason"] == "WriteRefused"]
    assert "exceeded quota: gpus" in event["message"]
    world.memory = dataclasses.replace(world.memory, refusals=(), num_refused_rounds=0)
    world.settle()
    assert len(world.created) == 4


def test_only_the_newest_failed_pods_are_kept() -> None:
    world = running_world()
    for _ in range(8):
        world.end_pod(world.created[-1] if world.created[-1] in world.names() else "digits-2", "Failed")
        world.settle()
        world.run_pods()
    failed = [name for name in world.names() if world.pods[name]["status"]["phase"] == "Failed"]
    deleting = [name for name in failed if "deletionTimestamp" in world.pods[name]["metadata"]]
    assert len(failed) - len(deleting) == 5


def test_a_rendezvous_on_a_dead_node_is_replaced_at_once() -> None:
    world = running_world()
    world.nodes["b"] = a_node("b", is_ready=False)
    world.pods["digits-rendezvous-0"]["spec"]["nodeName"] = "b"
    world.is_reachable, world.unheard_for_s = False, 40.0
    world.settle()
    assert world.created[-1] == "digits-rendezvous-1"
    assert world.names() == ["digits-0", "digits-1", "digits-2"]


def test_a_job_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    world = running_world()
    world.job["metadata"]["deletionTimestamp"] = world.now
    world.remove_pod("digits-0")
    world.settle()
    assert (world.job["status"]["state"], world.names()) == ("Deleting", ["digits-1", "digits-2"])
