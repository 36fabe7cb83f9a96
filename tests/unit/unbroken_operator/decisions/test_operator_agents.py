"""A pod whose agent does not stay up is replaced, once the rendezvous has given its ranks up."""

import dataclasses
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_job, running_world

from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.api import layout
from unbroken_operator.decisions.snapshot import MIN_AGENT_RESTARTS, pod_view

LAST = {"terminated": {"exitCode": 1, "reason": "Error", "message": "No space left\non device" + "x" * 5000}}
SHOWN = "its agent does not stay up: exit code 1, 3 restarts Error No space left on device"


def looping(num_restarts: int = MIN_AGENT_RESTARTS, **fields: Any) -> dict[str, Any]:
    """Return the status of a native sidecar that the kubelet will start again later."""
    return {
        "name": layout.AGENT_CONTAINER,
        "restartCount": num_restarts,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": LAST,
        **fields,
    }


def let_agent_crash(world: World, name: str, *containers: dict[str, Any], kind: str = "initContainerStatuses") -> None:
    world.pods[name]["status"][kind] = list(containers or (looping(),))


def give_up(world: World, name: str) -> None:
    """Let the rendezvous go on with the spare instead of digits-1, of which it knows nothing any more."""
    assert name == "digits-1"
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-2"], [], iteration=1)


def test_a_pod_whose_agent_crashes_again_and_again_is_replaced() -> None:
    """Before, it kept its place for ever: without a spare the job waited for it until it had failed."""
    world = running_world()
    let_agent_crash(world, "digits-1")
    give_up(world, "digits-1")
    world.settle()
    assert [(pod.name, pod.why[: len(SHOWN)]) for pod in world.deleted] == [("digits-1", SHOWN)]
    assert len(world.deleted[0].why) < 500
    assert world.created[-1] == "digits-3"
    world.run_pods()
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-2"], ["digits-3"], iteration=1)
    world.settle()
    assert len(world.deleted) == 1


def test_the_only_pod_of_a_job_is_replaced_as_well() -> None:
    world = World(a_job(replicas=1, spares={"count": 0}))
    world.settle()
    world.run_pods()
    let_agent_crash(world, "digits-0")
    world.rendezvous_says(JobPhase.INTERRUPTED, [], [], iteration=0)
    world.settle()
    assert [pod.name for pod in world.deleted] == ["digits-0"]
    assert world.created[-1] == "digits-1"


def test_a_plain_agent_container_that_has_crashed_does_not_come_back() -> None:
    world = running_world(sidecar={"mode": "Container"})
    ended = {"name": layout.AGENT_CONTAINER, "restartCount": 0, "state": LAST}
    let_agent_crash(world, "digits-1", ended, kind="containerStatuses")
    give_up(world, "digits-1")
    world.settle()
    assert [pod.name for pod in world.deleted] == ["digits-1"]


@pytest.mark.parametrize(
    "status",
    [
        pytest.param(looping(MIN_AGENT_RESTARTS - 1), id="a crash or two"),
        pytest.param(looping(state={"running": {}}), id="it runs again"),
        pytest.param(looping(state=LAST), id="it is just being started again"),
        pytest.param(looping(name="their-sidecar"), id="a container of the template's"),
        pytest.param({"name": layout.AGENT_CONTAINER}, id="a status that says nothing"),
    ],
)
def test_a_pod_whose_agent_may_stay_up_is_left_alone(status: dict[str, Any]) -> None:
    world = running_world()
    let_agent_crash(world, "digits-1", status)
    give_up(world, "digits-1")
    world.settle()
    assert world.deleted == []


def test_an_agent_that_ended_well_with_its_job_is_no_crash() -> None:
    world = running_world(sidecar={"mode": "Container"})
    ended = {"name": layout.AGENT_CONTAINER, "state": {"terminated": {"exitCode": 0}}}
    let_agent_crash(world, "digits-1", ended, kind="containerStatuses")
    assert pod_view(world.pods["digits-1"]).agent_crashes == ""


def test_ranks_that_train_on_while_their_agent_crashes_are_left_alone() -> None:
    world = running_world()
    let_agent_crash(world, "digits-1")
    world.settle()
    assert world.deleted == [], "the rendezvous says that it is connected"
    assert world.report is not None
    away = tuple(
        dataclasses.replace(pod, is_connected=False) if pod.pod == "digits-1" else pod for pod in world.report.pods
    )
    world.report = dataclasses.replace(world.report, pods=away, revision=world.report.revision + 1)
    world.settle()
    assert world.deleted == [], "it may come back within its grace"
    give_up(world, "digits-1")
    world.is_reachable = False
    world.settle()
    assert world.deleted == [], "nobody knows whether it was given up"


def test_a_job_in_which_no_agent_stays_up_from_the_start_keeps_its_pods_for_people_to_look_at() -> None:
    world = World()
    world.settle()
    world.run_pods()
    for name in world.names():
        let_agent_crash(world, name)
    world.rendezvous_says(JobPhase.FORMING, [], [])
    world.settle()
    assert world.deleted == []
    world.rendezvous_says(JobPhase.FORMING, ["digits-0"], [])
    world.settle()
    assert sorted(pod.name for pod in world.deleted) == ["digits-1", "digits-2"], "one that joined shows that it works"
