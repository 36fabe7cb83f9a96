"""A pod without contact to the rendezvous: when it goes on, and when it leaves its iteration by itself."""

from dataclasses import replace

import pytest

from unbroken.agent.decisions.events import (
    Action,
    AgentMemory,
    Connected,
    ConnectionRefused,
    Disconnected,
    LauncherAttached,
    LauncherReported,
    SendToLauncher,
    SendToRendezvous,
    SendToWorker,
    Ticked,
    WorkerAttached,
    WorkerReported,
)
from unbroken.agent.decisions.fence import isolation_patience_s, longest_retry_s, patience_s, ping_interval_s
from unbroken_core.pod.liveness import heartbeat_interval_s
from unbroken_core.pod.pod_messages import Attach, End, Enter, Leave, WorkerReport
from unbroken_core.protocol.messages import PROTOCOL, Fault, Hello, Plan, Welcome
from unbroken_core.protocol.settings import Timeouts
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

from .test_member import IN_PROCESS, PROCESS, Pod, plan, processes, ready, running

LIMIT_S = patience_s(IN_PROCESS.timeouts)
WHY = f"cut off from the rendezvous for {LIMIT_S:.1f} s: left, since others may have its ranks by now"


def lone_plan(iteration: int = 0) -> Plan:
    """Return a plan in which this pod holds all ranks."""
    return replace(plan(iteration), world_size=2)


def train(part: Plan) -> Pod:
    """Return an in-process pod that runs this plan."""
    pod = Pod()
    pod.join()
    pod.start_workers()
    pod.hear(part)
    for rank in (0, 1):
        pod.step(WorkerReported(rank, 0, WorkerReport(WorkerPhase.RUNNING, 0)))
    return pod


def leaves(actions: list[Action]) -> list[SendToWorker]:
    return [action for action in actions if isinstance(action, SendToWorker) and isinstance(action.message, Leave)]


def test_lone_pod_that_is_cut_off_leaves_before_its_ranks_can_be_given_away() -> None:
    pod = train(lone_plan())
    pod.step(Disconnected())
    assert leaves(pod.after(LIMIT_S - 0.1)) == []
    leave = Leave(0, Cause.HEARTBEAT_LOST, None, WHY)
    assert pod.member.next_deadline_s is not None
    assert leaves(pod.after(0.1)) == [SendToWorker(0, leave), SendToWorker(1, leave)]


def test_it_leaves_within_the_heartbeat_timeout_of_the_rendezvous_whatever_the_timeouts() -> None:
    """A ping after the last answer, half as long for its answer, patience; the rendezvous heard it a beat earlier."""
    for heartbeat_s in (0.5, 5.0, 30.0, 600.0):
        timeouts = Timeouts(heartbeat_s=heartbeat_s)
        latest_s = heartbeat_interval_s(timeouts) + 1.5 * ping_interval_s(timeouts) + patience_s(timeouts)
        assert latest_s < 0.95 * heartbeat_s
        assert patience_s(timeouts) <= 0.8 * timeouts.reconnect_s
        assert longest_retry_s(timeouts) < patience_s(timeouts) / 2


@pytest.mark.parametrize(
    ("part", "limit_s"),
    [
        pytest.param(lone_plan(), LIMIT_S, id="lone"),
        pytest.param(plan(0), isolation_patience_s(IN_PROCESS.timeouts), id="with peers"),
    ],
)
def test_workers_are_told_when_to_leave_without_an_agent(part: Plan, limit_s: float) -> None:
    """As soon as the agent would have told them, had it lost the rendezvous instead."""
    pod = Pod()
    pod.join()
    pod.start_workers()
    told = [action.message for action in pod.hear(part) if isinstance(action, SendToWorker)]
    assert [message.alone_s for message in told if isinstance(message, Enter)] == [limit_s, limit_s]


def test_spare_is_not_told_to_leave() -> None:
    pod = Pod()
    pod.join()
    pod.start_workers()
    spare = replace(plan(0), ranks=tuple(replace(part, rank=None) for part in plan(0).ranks))
    told = [action.message for action in pod.hear(spare) if isinstance(action, SendToWorker)]
    assert [message.alone_s for message in told if isinstance(message, Enter)] == [None, None]


def test_agent_that_starts_anew_counts_from_the_end_of_the_former_one() -> None:
    """Its workers tell it how long they were alone: the rendezvous has counted all that time."""
    earlier = train(lone_plan())
    pod = Pod(memory=AgentMemory(1, -1, earlier.member.instructions.plan))
    pod.step(LauncherAttached())
    pod.step(LauncherReported(processes(running(0), running(1))))
    for rank in (0, 1):
        attach = Attach(PROTOCOL, "worker", 50 + rank, rank, 0, away_s=LIMIT_S - 1.0)
        pod.step(WorkerAttached(attach), WorkerReported(rank, 0, WorkerReport(WorkerPhase.RUNNING, 0)))
    assert leaves(pod.after(0.9)) == []
    assert len(leaves(pod.after(0.2))) == 2


def test_workers_are_told_since_when_the_rendezvous_is_not_heard() -> None:
    """Their agent may end before it would tell them to leave: they count from the same instant."""
    pod = train(lone_plan())
    assert pod.warnings == []
    pod.now_s += 7.0
    pod.step(Disconnected())
    assert _lost_s(pod) == [0.0, 0.0]
    pod.after(LIMIT_S / 2)
    assert pod.warnings == [], "told once"
    attach = Attach(PROTOCOL, "worker", 50, 0, 0, away_s=0.1)
    pod.step(WorkerAttached(attach), WorkerReported(0, 0, WorkerReport(WorkerPhase.RUNNING, 0)))
    assert _lost_s(pod) == [LIMIT_S / 2]
    pod.join()
    assert _lost_s(pod) == [None, None]


def _lost_s(pod: Pod) -> list[float | None]:
    told = [action.message for action in pod.warnings if isinstance(action, SendToWorker)]
    return [message.lost_s for message in told if isinstance(message, Enter)]


def test_pod_whose_peers_hold_other_ranks_goes_on_until_the_isolation_time_is_nearly_over() -> None:
    """All of them may be cut off together, from a rendezvous that hears their spares."""
    pod = train(plan(0))
    pod.step(Disconnected())
    limit_s = isolation_patience_s(IN_PROCESS.timeouts)
    assert leaves(pod.after(limit_s - 0.1)) == []
    why = f"cut off from the rendezvous for {limit_s:.1f} s: left, since others may have its ranks by now"
    leave = Leave(0, Cause.HEARTBEAT_LOST, None, why)
    assert leaves(pod.after(0.1)) == [SendToWorker(0, leave), SendToWorker(1, leave)]


def test_pod_with_peers_has_left_before_the_isolation_time_of_the_rendezvous_is_over_whatever_the_timeouts() -> None:
    """Silence is noticed as late as may be, and the processes take all of their grace."""
    for heartbeat_s in (0.5, 5.0, 30.0, 600.0):
        for isolation_s in (None, 1.01 * (heartbeat_s + 5.0), 3600.0):
            timeouts = Timeouts(heartbeat_s=heartbeat_s, isolation_s=isolation_s)
            noticed_s = heartbeat_interval_s(timeouts) + 1.5 * ping_interval_s(timeouts)
            latest_s = noticed_s + isolation_patience_s(timeouts) + timeouts.termination_grace_s
            assert latest_s <= timeouts.isolation_limit_s - 0.29 * heartbeat_s
            assert isolation_patience_s(timeouts) > 0


def test_pod_goes_on_for_as_long_as_connections_are_refused_since_no_rendezvous_decides() -> None:
    pod = train(plan(0))
    pod.step(Disconnected())
    for _refusal in range(10):
        assert leaves(pod.after(isolation_patience_s(IN_PROCESS.timeouts) - 1.0)) == []
        pod.step(ConnectionRefused())


def test_pod_that_stands_still_while_it_is_cut_off_leaves_before_the_link_is_back() -> None:
    pod = train(plan(0))
    pod.step(Disconnected())
    assert leaves(pod.after(LIMIT_S)) == []
    boom = Fault(Cause.EXCEPTION, 0, "connection reset")
    actions = pod.step(WorkerReported(1, 0, WorkerReport(WorkerPhase.STOPPING, 0, fault=boom)))
    assert [order.local_rank for order in leaves(actions)] == [0, 1]
    for rank in (0, 1):
        pod.step(WorkerReported(rank, 0, replace(ready(rank, 0), fault=boom if rank == 1 else None)))
    (told,) = pod.step(Connected())
    assert isinstance(told, SendToRendezvous)
    assert isinstance(told.message, Hello)
    causes = [worker.fault.cause for worker in told.message.workers if worker.fault is not None]
    assert causes == [Cause.SOFT_TIMEOUT, Cause.EXCEPTION]


def test_pod_in_touch_with_a_rendezvous_that_took_over_waits_for_the_order_to_leave() -> None:
    """It may not know yet that the fault's iteration is its own."""
    pod = train(lone_plan())
    pod.step(Disconnected(), Connected())
    pod.hear(Welcome(PROTOCOL, 2, 5.0))
    boom = Fault(Cause.EXCEPTION, 0, "boom")
    assert leaves(pod.step(WorkerReported(1, 0, WorkerReport(WorkerPhase.STOPPING, 0, fault=boom)))) == []
    assert leaves(pod.after(10 * LIMIT_S)) == []


def test_lone_pod_goes_on_while_nobody_listens_at_the_rendezvous() -> None:
    pod = train(lone_plan())
    pod.step(Disconnected())
    for _attempt in range(100):
        pod.now_s += LIMIT_S / 2
        assert leaves(pod.step(ConnectionRefused())) == []
    assert len(leaves(pod.after(LIMIT_S))) == 2


def test_contact_that_comes_back_in_time_costs_nothing() -> None:
    pod = train(lone_plan())
    pod.step(Disconnected())
    pod.after(LIMIT_S / 2)
    pod.join()
    pod.now_s += 10 * LIMIT_S
    assert leaves(pod.step(Ticked())) == []


def test_connection_that_nobody_answers_is_no_contact() -> None:
    pod = train(lone_plan())
    pod.step(Disconnected(), Connected())
    assert len(leaves(pod.after(LIMIT_S))) == 2


def test_fenced_pod_says_why_it_left_and_waits_for_the_next_plan() -> None:
    pod = train(lone_plan())
    pod.step(Disconnected())
    pod.after(LIMIT_S)
    for rank in (0, 1):
        pod.step(WorkerReported(rank, 0, ready(rank, 0)))
    assert leaves(pod.after(100 * LIMIT_S)) == []
    (told,) = pod.step(Connected())
    assert isinstance(told, SendToRendezvous)
    assert isinstance(told.message, Hello)
    why = Fault(Cause.HEARTBEAT_LOST, 0, WHY, LIMIT_S)
    assert [(worker.phase, worker.fault) for worker in told.message.workers] == [(WorkerPhase.READY, why)] * 2
    pod.hear(Welcome(PROTOCOL, 1, 5.0))
    entered = pod.hear(lone_plan(1))
    assert [worker.iteration for worker in pod.member.workers] == [1, 1]
    assert entered
    assert {worker.fault for worker in pod.member.workers} == {None}


def test_lone_pod_that_has_completed_waits_for_the_rendezvous() -> None:
    pod = train(lone_plan())
    for rank in (0, 1):
        pod.step(WorkerReported(rank, 0, WorkerReport(WorkerPhase.COMPLETED, 0)))
    pod.step(Disconnected())
    assert leaves(pod.after(10 * LIMIT_S)) == []


def test_fenced_pod_without_in_process_restarts_ends_its_processes() -> None:
    pod = Pod(PROCESS)
    pod.join()
    pod.step(LauncherAttached(), LauncherReported(processes()))
    pod.hear(lone_plan())
    pod.step(LauncherReported(processes(running(0), running(1))))
    pod.step(Disconnected())
    assert pod.after(LIMIT_S) == [SendToLauncher(End(rank, 0, 5)) for rank in (0, 1)]
