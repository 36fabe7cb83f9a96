"""The largest numbers that a trainer may say: the agent goes on, and nobody refuses what it makes of them."""

from dataclasses import replace

from unbroken.agent.decisions.events import (
    Action,
    Disconnected,
    LauncherReported,
    SendToLauncher,
    SendToRendezvous,
    SendToWorker,
    WorkerAttached,
    WorkerReported,
)
from unbroken_core.pod.pod_messages import Attach, Enter, ToLauncher, ToWorker, WorkerReport
from unbroken_core.protocol import wire
from unbroken_core.protocol.bounds import MAX_CLAIMED, MAX_NUMBER, MAX_SECONDS
from unbroken_core.protocol.messages import PROTOCOL, AgentMessage, Fault, Hello, Report
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

from .test_member import Pod, processes, running

RECEIVERS = {SendToRendezvous: AgentMessage, SendToWorker: ToWorker, SendToLauncher: ToLauncher}


def read(actions: list[Action]) -> list[object]:
    """Return the messages as their receivers read them. Raises WireError for one that is refused."""
    sent = [action for action in actions if isinstance(action, SendToRendezvous | SendToWorker | SendToLauncher)]
    return [wire.decode(wire.encode(action.message), RECEIVERS[type(action)]) for action in sent]


def test_a_worker_that_was_away_for_thirty_years_does_not_silence_its_agent() -> None:
    """Before, no worker of the pod could read its orders any more."""
    pod = Pod()
    pod.run()
    for rank in (0, 1):
        pod.step(WorkerReported(rank, 0, WorkerReport(WorkerPhase.COMPLETED, 0)))
    pod.step(Disconnected())
    pod.step(WorkerAttached(Attach(PROTOCOL, "worker", 50, 0, 0, away_s=MAX_SECONDS)))
    pod.now_s += 1.0
    told = read(pod.step(WorkerReported(0, 0, WorkerReport(WorkerPhase.RUNNING, 0))))
    assert Enter in map(type, [*told, *read(pod.warnings)])


def test_a_fault_of_thirty_years_keeps_no_agent_from_joining_again() -> None:
    """Before, the rendezvous refused each Hello of the pod."""
    pod = Pod()
    pod.run()
    fault = Fault(Cause.EXCEPTION, 0, "x", MAX_SECONDS)
    read(pod.step(WorkerReported(0, 0, WorkerReport(WorkerPhase.STOPPING, 0, fault=fault))))
    pod.step(Disconnected())
    pod.now_s += 10.0
    (hello,) = [message for message in read(pod.join()) if isinstance(message, Hello)]
    assert hello.workers[0].fault == fault


def test_an_incarnation_that_leaves_no_room_for_the_next_is_not_believed() -> None:
    pod = Pod()
    pod.run()
    for number in (MAX_NUMBER, MAX_CLAIMED + 1):
        forged = replace(running(0), incarnation=number)
        read(pod.step(LauncherReported(processes(forged, running(1)))))
        assert pod.member.places[0].incarnation.number == 0
    actions = pod.step(LauncherReported(processes(replace(running(0), incarnation=MAX_CLAIMED), running(1))))
    (report,) = [message for message in read([*actions, *pod.after(0.06)]) if isinstance(message, Report)]
    assert report.workers[0].incarnation == MAX_CLAIMED
