"""What the operator tells a new coordinator of the world that it was not there to see the end of."""

from dataclasses import replace

from tests.unit.unbroken_operator.operator_world import running_world

from unbroken_core.protocol.messages import EarlierRun, GonePod, JobStatus, Observation, PodStatus
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Role
from unbroken_operator.decisions.actions import PushObservation
from unbroken_operator.decisions.memory import JobMemory
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.predecessor import earlier_run, follow, gone_pods


def a_report(term: int, phase: JobPhase, *pods: PodStatus, gained_s: float = 0.0) -> JobStatus:
    return JobStatus(
        1, "digits", term, 1, phase, Reason.TRAINING, "", 3, 2, 0, 0, pods, {}, {}, (), 7, 0.5, (), 0,
        gained_s=gained_s, ran_for_s=100.0,
    )  # fmt: skip


def member(name: str, *ranks: int) -> PodStatus:
    return PodStatus(name, f"uid-{name}", f"node-{name}", Role.ACTIVE, ranks, (), (), is_connected=True)


def test_pods_of_the_last_world_that_went_are_told_to_the_next_coordinator_and_to_no_other() -> None:
    world = running_world()
    pods = [pod for pod in world.snapshot().trainers() if pod.role == "active"]
    members = [replace(member(pod.name, rank), uid=pod.uid) for rank, pod in enumerate(pods)]
    memory = JobMemory()
    running = a_report(1, JobPhase.RUNNING, *members, gained_s=50.0)
    memory.update(pods, running, is_over=False, now_s=1000.0)
    memory.update(pods[1:], running, is_over=False, now_s=1010.0)
    assert memory.view(1020.0).gone == ()
    memory.update(pods[1:], a_report(2, JobPhase.FORMING), is_over=False, now_s=1200.0)
    view = memory.view(1207.0)
    assert view.gone == (GonePod(pods[0].name, f"node-{pods[0].name}", (0,)),)
    assert [pod.ago_s for pod in view.gone] == [197.0]
    assert (view.earlier, view.earlier_term) == (EarlierRun(207.0, 50.0, 100.0), 1)
    memory.update(pods[1:], a_report(2, JobPhase.RUNNING, *members[1:]), is_over=False, now_s=1210.0)
    assert memory.view(1211.0).gone == ()


def test_the_age_of_an_earlier_run_counts_from_its_last_report() -> None:
    last = a_report(1, JobPhase.RUNNING, gained_s=50.0)
    known = follow(follow(follow(JobMemory().predecessor, last, [], 10.0), last, [], 90.0), None, [], 95.0)
    assert earlier_run(known, 100.0) is None
    known = follow(known, a_report(2, JobPhase.FORMING), [], 100.0)
    told = earlier_run(known, 110.0)
    assert told is not None
    assert (told.ago_s, told.gained_s, told.ran_for_s) == (100.0, 50.0, 100.0)
    assert gone_pods(known, 110.0) == ()


def test_ages_alone_are_no_news_for_a_rendezvous() -> None:
    world = running_world()
    world.report = a_report(2, JobPhase.FORMING)
    gone = (GonePod("digits-0", "node", (0,), 5.0),)

    def pushes(seconds: float, sent: Observation | None = None) -> list[PushObservation]:
        memory = replace(
            world.memory,
            gone=tuple(replace(pod, ago_s=seconds) for pod in gone),
            earlier=EarlierRun(seconds, 1.0, 2.0),
            earlier_term=1,
            sent=sent,
            sent_to=world.report_from,
            sent_term=2,
        )
        actions = plan(replace(world.snapshot(), memory=memory)).actions
        return [action for action in actions if isinstance(action, PushObservation)]

    (push,) = pushes(1.0)
    assert (push.observation.gone, push.observation.earlier) == (gone, EarlierRun(1.0, 1.0, 2.0))
    assert pushes(60.0, push.observation) == []
