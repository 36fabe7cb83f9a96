"""What happens between the return of the training function and the ends of the processes."""

import dataclasses

from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import AgentDisconnected, Observed
from unbroken_core.protocol.messages import Fault, Finish, Interrupt, Observation, PodObservation, Respawn
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Role

from .test_coordinator import COMPLETED, GONE, Bench, sent


def ending() -> Bench:
    """Return a job whose function has returned everywhere; the processes of p0 have ended well."""
    bench = Bench()
    bench.run("p0", "p1", "p2")
    bench.all_are(COMPLETED, 0, "p0", "p1")
    for local_rank in range(2):
        bench.worker("p0", local_rank, COMPLETED, has_ended=True)
    status = bench.status()
    assert (status.phase, status.reason) == (JobPhase.ENDING, Reason.ENDING)
    return bench


def outcome(bench: Bench) -> tuple[JobPhase, Reason, str]:
    status = bench.status()
    return status.phase, status.reason, status.message


def test_process_that_fails_after_the_training_fails_the_job_and_disturbs_nobody() -> None:
    bench = ending()
    actions = bench.fault("p1", 1, Cause.PROCESS_EXIT, GONE)
    assert outcome(bench) == (JobPhase.FAILED, Reason.FAILED_AFTER_TRAINING, "rank 3 in p1 process-exit of p1")
    assert not any(sent(actions, kind) for kind in (Finish, Interrupt, Respawn))
    bench.worker("p1", 0, COMPLETED, has_ended=True)
    assert bench.status().phase is JobPhase.FAILED


def test_pod_that_is_lost_before_its_processes_have_ended_fails_the_job() -> None:
    bench = ending()
    bench.step(AgentDisconnected(bench.sessions["p1"]))
    bench.tick(60.0)
    phase, reason, message = outcome(bench)
    assert (phase, reason) == (JobPhase.FAILED, Reason.FAILED_AFTER_TRAINING)
    assert message.startswith(
        "p1 was lost after the training function had returned, before it said how its processes ended: "
    )


def test_pod_that_is_away_while_the_job_ends_has_time_to_say_how_its_processes_ended() -> None:
    """Nobody waits to train on; before, the short grace of a running job failed one that had trained."""
    bench = ending()
    timeouts = bench.settings.timeouts
    assert timeouts.reconnect_s + 1.0 < timeouts.heartbeat_s
    plan = bench.coordinator._job.members.by_uid["uid-p1"].plan
    bench.step(AgentDisconnected(bench.sessions["p1"]))
    bench.live(timeouts.reconnect_s + 1.0)
    assert bench.status().phase is JobPhase.ENDING
    bench.join("p1", plan=plan, term=1)
    for local_rank in range(2):
        bench.worker("p1", local_rank, COMPLETED, has_ended=True)
    assert outcome(bench) == (JobPhase.COMPLETE, Reason.COMPLETED, "all 4 ranks completed")


def test_pod_whose_processes_have_ended_may_go() -> None:
    bench = ending()
    bench.step(AgentDisconnected(bench.sessions["p0"]))
    bench.live(1.0)
    pods = {f"uid-{name}": PodObservation(name, "n", ()) for name in ("p1", "p2")}
    bench.step(Observed(Observation(pods)))
    assert bench.status().phase is JobPhase.ENDING
    for local_rank in range(2):
        bench.worker("p1", local_rank, COMPLETED, has_ended=True)
    assert outcome(bench) == (JobPhase.COMPLETE, Reason.COMPLETED, "all 4 ranks completed")


def test_pod_that_the_cluster_saw_succeed_needs_no_last_report() -> None:
    bench = ending()
    pods = {f"uid-{name}": PodObservation(name, "n", (), is_ended=name == "p1") for name in ("p0", "p1", "p2")}
    bench.step(Observed(Observation(pods)))
    bench.step(AgentDisconnected(bench.sessions["p1"]))
    assert bench.status().phase is JobPhase.ENDING
    bench.tick(60.0)
    assert bench.status().phase is JobPhase.COMPLETE


def test_failed_spare_does_not_fail_a_job_that_has_trained() -> None:
    bench = ending()
    bench.worker("p2", 0, GONE)
    bench.step(AgentDisconnected(bench.sessions["p2"]))
    bench.live(60.0)
    assert bench.status().phase is JobPhase.ENDING


def test_processes_that_do_not_end_are_waited_for_as_long_as_agents_do_and_no_longer() -> None:
    bench = ending()
    timeouts = bench.settings.timeouts
    bench.live(max(timeouts.completion_s, timeouts.startup_s))
    assert bench.status().phase is JobPhase.ENDING
    bench.live(timeouts.termination_grace_s + 31.0)
    phase, reason, message = outcome(bench)
    assert (phase, reason) == (JobPhase.FAILED, Reason.FAILED_AFTER_TRAINING)
    assert message.startswith("processes of p1 had not ended 635 s after")
    assert bench.coordinator.next_deadline_s() is None


def test_new_rendezvous_takes_over_a_job_that_is_ending() -> None:
    before = ending()
    bench = Bench()
    bench.states = before.states
    plans = {pod: before.coordinator._job.members.by_uid[f"uid-{pod}"].plan for pod in ("p0", "p1", "p2")}
    for pod, plan in plans.items():
        bench.join(pod, plan=plan, term=1)
    assert bench.status().phase is JobPhase.ENDING
    for local_rank in range(2):
        bench.worker("p1", local_rank, COMPLETED, has_ended=True)
    assert bench.status().phase is JobPhase.COMPLETE


def seen(done: tuple[str, ...], gone: tuple[str, ...] = ()) -> Observation:
    """Return what the operator sees: p0 and p1 are active, these have ended, well or not."""
    pods = {
        f"uid-{name}": PodObservation(
            name,
            "n",
            (),
            role=Role.SPARE if name == "p2" else Role.ACTIVE,
            gone=Cause.POD_LOST if name in gone else None,
            is_ended=name in done + gone,
        )
        for name in ("p0", "p1", "p2")
    }
    return Observation(pods, is_accounted=True)


def takes_over(*pods: str, observed: Observation, highest_iteration: int = 0) -> Bench:
    """Return a new rendezvous of a job that is ending, to which only these pods come back."""
    before = ending()
    bench = Bench()
    bench.coordinator = Coordinator(bench.settings, 0.0, term=2, highest_iteration=highest_iteration)
    bench.states = before.states
    bench.step(Observed(observed))
    for pod in pods:
        bench.join(pod, plan=before.coordinator._job.members.by_uid[f"uid-{pod}"].plan, term=1)
    return bench


def test_rendezvous_lost_while_a_job_ends_does_not_fail_it_for_pods_that_have_ended_well() -> None:
    bench = takes_over("p1", "p2", observed=seen(done=("p0",)))
    status = bench.status()
    assert (status.phase, status.reason, status.world_size) == (JobPhase.ENDING, Reason.ENDING, 4)
    bench.live(bench.settings.timeouts.heartbeat_s + 1.0)
    for local_rank in range(2):
        bench.worker("p1", local_rank, COMPLETED, has_ended=True)
    assert outcome(bench) == (JobPhase.COMPLETE, Reason.COMPLETED, "all 4 ranks completed")
    assert bench.status().recoveries == ()


def test_pod_that_completed_an_earlier_iteration_does_not_stand_for_those_of_the_last_one() -> None:
    """It was cut off meanwhile. The pods that ended well were with another one, of which nobody has heard the end."""
    bench = takes_over("p1", "p2", observed=seen(done=("p0",)), highest_iteration=1)
    assert bench.status().phase is not JobPhase.ENDING
    for local_rank in range(2):
        bench.worker("p1", local_rank, COMPLETED, has_ended=True)
    assert bench.status().phase is not JobPhase.COMPLETE


def test_process_that_failed_after_the_training_fails_the_job_at_a_new_rendezvous_too() -> None:
    bench = takes_over(observed=seen(done=("p0",)))
    states = bench.states["p1"]
    fault = Fault(Cause.PROCESS_EXIT, 0, "exited with code 3")
    bench.states["p1"] = [states[0], dataclasses.replace(states[1], phase=GONE, fault=fault)]
    bench.join("p1", plan=ending().coordinator._job.members.by_uid["uid-p1"].plan, term=1)
    assert outcome(bench) == (JobPhase.FAILED, Reason.FAILED_AFTER_TRAINING, "rank 3 in p1 exited with code 3")


def test_job_whose_pods_all_ended_well_while_no_rendezvous_ran_is_complete() -> None:
    bench = takes_over(observed=seen(done=("p0", "p1", "p2")))
    assert outcome(bench) == (
        JobPhase.COMPLETE,
        Reason.COMPLETED,
        "all 2 active pods ended well while no rendezvous ran",
    )


def test_pod_that_does_not_come_back_to_a_rendezvous_after_the_training_fails_the_job() -> None:
    bench = takes_over(observed=seen(done=("p0",)))
    assert outcome(bench)[1] is Reason.ENDING
    bench.tick(bench.settings.timeouts.heartbeat_s)
    assert outcome(bench) == (
        JobPhase.FAILED,
        Reason.FAILED_AFTER_TRAINING,
        "p1 did not come back to a new rendezvous after the training function had returned",
    )


def test_job_with_a_pod_that_did_not_end_well_is_not_taken_for_complete() -> None:
    bench = takes_over(observed=seen(done=("p0", "p2"), gone=("p1",)))
    bench.live(60.0)
    assert bench.status().phase is JobPhase.FORMING


def test_first_start_of_a_job_does_not_count_pods_that_have_ended() -> None:
    bench = Bench()
    bench.step(Observed(seen(done=("p0", "p1"))))
    assert bench.status().phase is JobPhase.FORMING
