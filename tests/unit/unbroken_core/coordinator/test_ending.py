"""What happens between the return of the training function and the ends of the processes."""

from unbroken_core.coordinator.events import AgentDisconnected, Observed
from unbroken_core.messages import Finish, Interrupt, Observation, PodObservation, Respawn
from unbroken_core.reasons import Cause, JobPhase, Reason

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
    assert message.startswith("p1 was lost before its processes had ended, after the training function had returned")


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
