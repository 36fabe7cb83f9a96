"""What a pod's containers do next."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_local.kubelet.decide import (
    ContainerState,
    Decision,
    Phase,
    StartContainer,
    Stop,
    StopContainer,
    Termination,
    decide,
)
from unbroken_local.kubelet.spec import PodSpec, read_pod
from unbroken_local.kubelet.status import PodFacts, build_status, pod_phase

WAITING = ContainerState()
RUNNING = ContainerState(phase=Phase.RUNNING, is_started=True, is_ready=True, started_at="t0")
STARTING = replace(RUNNING, is_started=False, is_ready=False)


def ended(code: int, not_before_s: float = 0.0) -> ContainerState:
    reason = "Completed" if code == 0 else "Error"
    return ContainerState(phase=Phase.TERMINATED, termination=Termination(code, reason), not_before_s=not_before_s)


def pod(policy: str = "Always", inits: tuple[str, ...] = (), mains: tuple[str, ...] = ("main",)) -> PodSpec:
    """Names of init containers that begin with "side" are sidecars."""
    spec: dict[str, Any] = {
        "restartPolicy": policy,
        "initContainers": [
            {"name": name, "image": "i", **({"restartPolicy": "Always"} if name.startswith("side") else {})}
            for name in inits
        ],
        "containers": [{"name": name, "image": "i"} for name in mains],
    }
    return read_pod({"metadata": {"uid": "u", "name": "p", "namespace": "n"}, "spec": spec})


def starts(decision: Decision) -> list[str]:
    return [action.name for action in decision.actions if isinstance(action, StartContainer)]


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param({}, ["init-a"], id="the first init container starts alone"),
        pytest.param({"init-a": RUNNING}, [], id="the sidecar waits for the init container before it"),
        pytest.param({"init-a": ended(0)}, ["side"], id="the sidecar starts after it"),
        pytest.param({"init-a": ended(0), "side": STARTING}, [], id="a sidecar that has not started holds the next"),
        pytest.param({"init-a": ended(0), "side": RUNNING}, ["init-b"], id="a started sidecar lets the next start"),
        pytest.param(
            {"init-a": ended(0), "side": RUNNING, "init-b": ended(0)},
            ["one", "two"],
            id="main containers start together",
        ),
        pytest.param({"init-a": ended(0), "side": ended(1), "init-b": RUNNING}, ["side"], id="a dead sidecar restarts"),
        pytest.param({"init-a": ended(2)}, ["init-a"], id="a failed init container is started again"),
        pytest.param(
            {"init-a": ended(0), "side": ended(0), "init-b": ended(0), "one": RUNNING, "two": RUNNING},
            ["side"],
            id="a sidecar restarts beside running main containers",
        ),
    ],
)
def test_init_containers_and_sidecars_start_in_order(states: dict[str, ContainerState], expected: list[str]) -> None:
    spec = pod(inits=("init-a", "side", "init-b"), mains=("one", "two"))
    everyone = {c.name: WAITING for c in spec.containers} | states
    assert starts(decide(spec, everyone, None, 100.0)) == expected


@pytest.mark.parametrize(
    ("policy", "code", "is_restarted"),
    [
        ("Always", 0, True),
        ("Always", 1, True),
        ("OnFailure", 0, False),
        ("OnFailure", 1, True),
        ("Never", 0, False),
        ("Never", 1, False),
    ],
)
def test_restart_policy_decides_whether_an_ended_container_starts_again(
    policy: str, code: int, is_restarted: bool
) -> None:
    decision = decide(pod(policy), {"main": ended(code)}, None, 100.0)
    assert (starts(decision) == ["main"], decision.is_over) == (is_restarted, not is_restarted)


def test_a_container_in_back_off_starts_at_its_time_and_not_before() -> None:
    state = ended(1, not_before_s=107.0)
    assert decide(pod(), {"main": state}, None, 100.0) == Decision((), 107.0)
    assert starts(decide(pod(), {"main": state}, None, 107.0)) == ["main"]


def test_a_start_that_is_under_way_is_not_repeated() -> None:
    assert decide(pod(), {"main": replace(WAITING, is_busy=True)}, None, 1.0) == Decision()


def test_sidecars_stop_one_by_one_last_first_when_the_main_containers_are_done() -> None:
    spec = pod("Never", inits=("side-a", "side-b"))
    states = {"side-a": RUNNING, "side-b": RUNNING, "main": ended(0)}
    assert decide(spec, states, None, 1.0) == Decision((StopContainer("side-b", None),))
    states["side-b"] = ended(143)
    assert decide(spec, states, None, 1.0) == Decision((StopContainer("side-a", None),))
    states["side-a"] = ended(0)
    assert decide(spec, states, None, 1.0) == Decision(is_over=True)


def test_a_deleted_pod_stops_its_main_containers_before_its_sidecars() -> None:
    spec = pod(inits=("side-a", "side-b"))
    states = {"side-a": RUNNING, "side-b": RUNNING, "main": RUNNING}
    stop = Stop(deadline_s=30.0)
    assert decide(spec, states, stop, 1.0) == Decision((StopContainer("main", 30.0),), 30.0)
    states["main"] = ended(143)
    assert decide(spec, states, stop, 1.0) == Decision((StopContainer("side-b", 30.0),), 30.0)


def test_at_the_deadline_everything_is_stopped_at_once() -> None:
    spec = pod(inits=("side-a", "side-b"))
    states = {"side-a": RUNNING, "side-b": RUNNING, "main": RUNNING}
    stopped = {action.name for action in decide(spec, states, Stop(30.0), 30.0).actions}
    assert stopped == {"main", "side-a", "side-b"}


def test_nothing_is_started_in_a_pod_that_is_to_stop() -> None:
    assert decide(pod(), {"main": WAITING}, Stop(30.0), 1.0) == Decision(is_over=True)


def test_an_init_container_that_fails_for_good_fails_the_pod_and_ends_its_sidecars() -> None:
    spec = pod("Never", inits=("side", "init"))
    states = {"side": RUNNING, "init": ended(1), "main": WAITING}
    assert decide(spec, states, None, 1.0).actions == (StopContainer("side", None),)
    assert pod_phase(spec, states, None) == "Pending"
    assert pod_phase(spec, states | {"side": ended(0)}, None) == "Failed"


@pytest.mark.parametrize(
    ("policy", "states", "expected"),
    [
        pytest.param("Always", {"one": WAITING, "two": WAITING}, "Pending", id="nothing has run"),
        pytest.param("Always", {"one": RUNNING, "two": WAITING}, "Running", id="one runs"),
        pytest.param("Never", {"one": ended(0), "two": RUNNING}, "Running", id="one of two has ended"),
        pytest.param("Never", {"one": ended(0), "two": ended(0)}, "Succeeded", id="both ended with 0"),
        pytest.param("Never", {"one": ended(0), "two": ended(7)}, "Failed", id="one ended with 7"),
        pytest.param("Always", {"one": ended(0), "two": ended(7)}, "Running", id="both will be started again"),
        pytest.param("OnFailure", {"one": ended(0), "two": ended(7)}, "Running", id="the failed one starts again"),
    ],
)
def test_phase_follows_the_main_containers(policy: str, states: dict[str, ContainerState], expected: str) -> None:
    assert pod_phase(pod(policy, mains=("one", "two")), states, None) == expected


def test_a_pod_is_not_over_while_a_sidecar_still_runs() -> None:
    spec = pod("Never", inits=("side",))
    assert pod_phase(spec, {"side": RUNNING, "main": ended(0)}, None) == "Running"
    assert pod_phase(spec, {"side": ended(9), "main": ended(0)}, None) == "Succeeded"


def test_a_pod_past_its_active_deadline_has_failed_and_says_why() -> None:
    spec = pod()
    stop = Stop(1.0, "DeadlineExceeded", "too long")
    status = build_status(spec, {"main": ended(143)}, stop, PodFacts("h", "i", "s", "now"), {})
    assert (status["phase"], status["reason"], status["message"]) == ("Failed", "DeadlineExceeded", "too long")


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str | None, str]]:
    return {c["type"]: (c["status"], c.get("reason"), c["lastTransitionTime"]) for c in status["conditions"]}


def test_conditions_change_their_time_only_with_their_status_and_leave_those_of_others_alone() -> None:
    spec = pod()
    facts = PodFacts("h", "1.2.3.4", "s", "t1")
    gate = {"type": "example.com/gate", "status": "True", "lastTransitionTime": "t0"}
    first = build_status(spec, {"main": WAITING}, None, facts, {"conditions": [gate]})
    assert conditions(first) == {
        "Initialized": ("True", None, "t1"),
        "Ready": ("False", "ContainersNotReady", "t1"),
        "ContainersReady": ("False", "ContainersNotReady", "t1"),
        "PodScheduled": ("True", None, "t1"),
        "example.com/gate": ("True", None, "t0"),
    }
    second = build_status(spec, {"main": RUNNING}, None, replace(facts, now="t2"), first)
    assert conditions(second) == {
        **conditions(first),
        "Ready": ("True", None, "t2"),
        "ContainersReady": ("True", None, "t2"),
    }


def test_a_finished_pod_is_not_ready_because_it_is_completed() -> None:
    status = build_status(pod("Never"), {"main": ended(0)}, None, PodFacts("h", "i", "s", "t"), {})
    assert conditions(status)["Ready"] == ("False", "PodCompleted", "t")
    assert conditions(status)["Initialized"] == ("True", None, "t")


def test_container_status_shows_state_last_state_and_restarts() -> None:
    spec = pod(inits=("init",))
    last = Termination(3, "Error", "a", "b", "why")
    states = {"init": ended(0), "main": replace(RUNNING, last=last, restarts=2)}
    status = build_status(spec, states, None, PodFacts("h", "i", "s", "t"), {})
    assert status["containerStatuses"] == [
        {
            "name": "main",
            "image": "i",
            "imageID": "local://i",
            "containerID": "local://u/main/2",
            "ready": True,
            "restartCount": 2,
            "started": True,
            "state": {"running": {"startedAt": "t0"}},
            "lastState": {
                "terminated": {"exitCode": 3, "reason": "Error", "startedAt": "a", "finishedAt": "b", "message": "why"}
            },
        }
    ]
    assert status["initContainerStatuses"][0]["state"] == {"terminated": {"exitCode": 0, "reason": "Completed"}}


def test_a_sidecar_that_is_not_ready_makes_the_pod_not_ready() -> None:
    spec = pod(inits=("side",))
    states = {"side": replace(RUNNING, is_ready=False), "main": RUNNING}
    ready = conditions(build_status(spec, states, None, PodFacts("h", "i", "s", "t"), {}))["Ready"]
    assert ready == ("False", "ContainersNotReady", "t")
