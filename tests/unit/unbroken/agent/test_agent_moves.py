"""What an agent does while ranks of its pod, or of others, are to move as planned."""

from dataclasses import replace

from unbroken.agent.decisions.events import (
    Action,
    AgentMemory,
    Disconnected,
    Exit,
    LauncherLost,
    LauncherReported,
    SendToLauncher,
    SendToRendezvous,
    SendToWorker,
    Terminated,
    WorkerAttached,
    WorkerReported,
)
from unbroken_core.pod.pod_messages import Attach, End, Processes, WorkerReport
from unbroken_core.protocol.messages import PROTOCOL, Halt, Halted, Report
from unbroken_core.vocabulary.reasons import Role, WorkerPhase

from .test_member import Pod, interrupt, plan, ready, running

HALT = Halt(term=1, number=1, iteration=0, step=0, is_common=False, within_s=30.0)
TRAINS = WorkerReport(WorkerPhase.RUNNING, 0)
DRAINING = Processes((running(0), running(1)), is_leaving=True, is_draining=True)


def halted(pod: Pod, rank: int, is_held: bool = True) -> list[Action]:
    return pod.step(WorkerReported(rank, 0, replace(TRAINS, halted=Halted(1, 1, 7, is_held))))


def answers(actions: list[Action]) -> list[Halted | None]:
    (report,) = [a.message for a in actions if isinstance(a, SendToRendezvous) and isinstance(a.message, Report)]
    return [worker.halted for worker in report.workers]


def test_order_to_halt_is_passed_on_to_workers_in_the_iteration_once_a_connection() -> None:
    pod = Pod()
    pod.run()
    assert pod.hear(HALT) == [SendToWorker(0, HALT), SendToWorker(1, HALT)]
    assert pod.hear(HALT) == []
    pod.step(WorkerAttached(Attach(PROTOCOL, "worker", 50, 0, 0)))
    assert pod.step(WorkerReported(0, 0, TRAINS)) == [SendToWorker(0, HALT)]
    assert pod.hear(replace(HALT, number=2, iteration=1)) == []


def test_order_of_an_older_term_and_one_for_an_iteration_that_is_over_are_ignored() -> None:
    pod = Pod(memory=AgentMemory(term=1))
    pod.run()
    assert pod.hear(replace(HALT, term=0)) == []
    pod.hear(interrupt(0))
    assert pod.hear(HALT) == []


def test_answers_of_a_pods_workers_are_told_together() -> None:
    """Thousands of pods answer at once: one report of each is enough."""
    pod = Pod()
    pod.run()
    pod.hear(HALT)
    assert halted(pod, 0) == []
    assert answers(halted(pod, 1)) == [Halted(1, 1, 7, True)] * 2


def test_worker_that_answers_late_does_not_hold_up_the_answer_of_another() -> None:
    """It may wait in a collective for one that waits after its step."""
    pod = Pod()
    pod.run()
    pod.hear(HALT)
    halted(pod, 0)
    assert answers(pod.after(0.06)) == [Halted(1, 1, 7, True), None]


def test_workers_of_a_pod_that_drains_train_until_their_ranks_have_moved() -> None:
    """The pod goes once nobody needs it any more."""
    pod = Pod()
    pod.run()
    (told,) = pod.step(LauncherReported(DRAINING))
    assert isinstance(told, SendToRendezvous)
    assert isinstance(told.message, Report)
    assert told.message.is_leaving
    pod.hear(interrupt(0))
    leaves = pod.step(WorkerReported(0, 0, replace(TRAINS, phase=WorkerPhase.STOPPING)))
    assert not [action for action in leaves if isinstance(action, SendToLauncher)]
    assert SendToLauncher(End(0, 0, 5)) in pod.step(WorkerReported(0, 0, ready(0, 0)))


def test_spares_of_a_pod_that_drains_are_ended_at_once() -> None:
    pod = Pod()
    pod.join()
    pod.start_workers()
    pod.hear(plan(0, role=Role.SPARE))
    actions = pod.step(LauncherReported(DRAINING))
    assert [action for action in actions if isinstance(action, SendToLauncher)] == [
        SendToLauncher(End(0, 0, 5)),
        SendToLauncher(End(1, 0, 5)),
    ]


def test_workers_of_a_pod_that_drains_are_ended_when_nobody_can_move_their_ranks() -> None:
    pod = Pod()
    pod.run()
    pod.step(LauncherReported(DRAINING))
    assert pod.step(Disconnected()) == [SendToLauncher(End(0, 0, 5)), SendToLauncher(End(1, 0, 5))]


def test_agent_that_is_told_to_end_stays_for_a_launcher_that_drains() -> None:
    pod = Pod()
    pod.run()
    pod.step(LauncherReported(DRAINING), Terminated())
    assert Exit(0) not in pod.after(20.0)
    assert Exit(0) in pod.member.step(LauncherLost(), pod.now_s)
