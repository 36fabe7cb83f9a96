"""How old the end of an iteration is, for a rendezvous that was not there to see it."""

import pytest

from unbroken.agent.decisions.events import Connected, Disconnected, SendToRendezvous, WorkerReported
from unbroken_core.protocol.messages import Hello

from .test_member import Pod, interrupt, plan, raised, ready


def hello(pod: Pod) -> Hello:
    (action,) = [action for action in pod.step(Connected()) if isinstance(action, SendToRendezvous)]
    assert isinstance(action.message, Hello)
    return action.message


def running_pod() -> Pod:
    """Return a pod whose workers entered iteration 0 a moment (0.06 s) ago, without contact to the rendezvous."""
    pod = Pod()
    pod.run()
    pod.step(Disconnected())
    return pod


def test_an_agent_says_since_when_its_workers_are_in_the_iteration_and_nothing_of_an_end_that_was_not() -> None:
    pod = running_pod()
    pod.now_s += 100.94
    said = hello(pod)
    assert said.entered_ago_s == pytest.approx(101.0)
    assert said.over_ago_s == 0.0


def test_an_agent_says_since_when_the_iteration_is_over() -> None:
    pod = running_pod()
    pod.now_s += 99.94
    pod.step(raised(1))
    pod.now_s += 5.0
    said = hello(pod)
    assert said.entered_ago_s == pytest.approx(105.0)
    assert said.over_ago_s == 5.0
    assert said.workers[1].fault is not None
    assert said.workers[1].fault.detect_s == 5.0


def test_an_order_to_leave_is_the_end_of_the_iteration() -> None:
    pod = Pod()
    pod.run()
    pod.hear(interrupt(0))
    pod.step(Disconnected())
    pod.now_s += 8.0
    assert hello(pod).over_ago_s == 8.0


def test_the_ages_are_those_of_the_newest_plan() -> None:
    pod = Pod()
    pod.run()
    pod.hear(interrupt(0))
    pod.now_s += 8.0
    for local_rank in (0, 1):
        pod.step(WorkerReported(local_rank, 0, ready(local_rank, 0)))
    pod.hear(plan(1))
    pod.step(Disconnected())
    pod.now_s += 7.0
    said = hello(pod)
    assert (said.entered_ago_s, said.over_ago_s) == (7.0, 0.0)
