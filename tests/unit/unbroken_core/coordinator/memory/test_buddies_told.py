"""Who keeps whose copies: what the coordinator tells pods, and when."""

from dataclasses import replace
from typing import Any

from tests.unit.unbroken_core.coordinator.test_coordinator import Bench

from unbroken_core.coordinator.events import Action, AgentReported, Observed, Send
from unbroken_core.protocol.messages import Buddies, Observation, Plan, PodObservation, Report, Welcome
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.checkpoints import Copy, Held, Holding
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

RACKS = {"digits-0": "r1", "digits-1": "r1", "digits-2": "r2", "digits-3": "r2", "digits-4": "r3"}
SETTINGS = JobSettings("digits", replicas=4, min_replicas=2, spares=1, layers=(Layer("rack"),), copies=1, across="rack")
PODS = tuple(RACKS)


class CopyBench(Bench):
    """A job whose pods have keepers."""

    def __init__(self, settings: JobSettings = SETTINGS, port: int = 7) -> None:
        super().__init__(settings)
        self.port = port
        self.held = {pod: Held(f"0{pod[-1]}", (), (), (), f"10.0.0.{pod[-1]}", port) for pod in PODS}
        self.racks = dict(RACKS)

    def hello(self, pod: str, **changes: Any) -> Any:
        domains = (self.racks[pod],) if self.settings.layers else ()
        return super().hello(pod, **({"memory": self.held[pod], "domains": domains} | changes))

    def tell(self, pod: str, held: Held) -> list[Action]:
        self.seq += 1
        self.held[pod] = held
        message = Report(self.seq, tuple(self.states[pod]), memory=held)
        return self.step(AgentReported(self.sessions[pod], message))

    def tick(self, seconds: float) -> list[Action]:
        """Let time pass; each keeper takes what it is told, and says which steps it does not overwrite."""
        actions = super().tick(seconds)
        for pod, told in self.buddies(actions).items():
            pinned = tuple(key for key in (told.protected, told.next_protected) if key is not None)
            if pinned != self.held[pod].pinned:
                actions += self.tell(pod, replace(self.held[pod], pinned=pinned))
        return actions

    def settle(self) -> dict[str, Buddies]:
        """Let the coordinator look at what was saved, and keepers answer; return what they were told last."""
        return {pod: told for _ in range(3) for pod, told in self.buddies(self.tick(0.2)).items()}

    def see_gone(self, gone: str) -> list[Action]:
        """The operator sees that a pod is no more."""
        pods = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", (RACKS[pod],)) for pod in PODS}
        actions = self.step(Observed(Observation(pods, is_accounted=True)))
        self.sessions.pop(gone)
        left = {uid: pod for uid, pod in pods.items() if pod.pod != gone}
        return actions + self.step(Observed(Observation(left, is_accounted=True)))

    def buddies(self, actions: list[Action]) -> dict[str, Buddies]:
        """Return what pods were told, by pod."""
        by_session = {session: pod for pod, session in self.sessions.items()}
        return {
            by_session[one.session]: one.message
            for one in actions
            if isinstance(one, Send) and isinstance(one.message, Buddies)
        }

    def run_job(self, *pods: str) -> dict[str, Buddies]:
        actions = list[Action]()
        for pod in pods:
            actions += self.join(pod)
        actions += self.tick(self.settings.timeouts.last_call_s)
        iteration = self.status().iteration
        actions += self.all_are(WorkerPhase.RUNNING, iteration, *pods[: self.settings.replicas])
        return self.buddies(actions + self.tick(1.1))

    def save(self, iteration: int, step: int, told: dict[str, Buddies], *pods: str) -> None:
        """All ranks save a step, and those that shall keep its copies have them."""
        ranks, size = (
            {pod.uid: pod.ranks for pod in self.status().pods},
            self.settings.replicas * self.settings.ranks_per_pod,
        )

        def shards(uid: str) -> tuple[tuple[int, str, str], ...]:
            return tuple((rank, "1a", f"{step:x}{rank:x}") for rank in ranks[uid])

        for pod in pods:
            uid = f"uid-{pod}"
            own = Holding(uid, 1, iteration, step, size, shards(uid))
            copies = tuple(Copy(one, 1, iteration, step, size, shards(one)) for one in told[pod].owners)
            self.tell(pod, replace(self.held[pod], holdings=(own,) if ranks[uid] else (), copies=copies))


def test_pods_of_different_racks_keep_each_others_copies() -> None:
    bench = CopyBench()
    told = bench.run_job(*PODS)
    assert told.keys() == set(PODS), "a spare is told that it keeps nothing"
    for pod in PODS[:4]:
        (keeper,) = told[pod].keepers
        other = keeper.uid.removeprefix("uid-")
        assert RACKS[pod] != RACKS[other]
        assert told[other].owners == (f"uid-{pod}",), "mutual"
        assert (keeper.host, keeper.port) == (bench.held[other].host, 7)
    assert (told[PODS[4]].keepers, told[PODS[4]].owners) == ((), ())


def test_every_agent_is_told_how_many_copies_there_shall_be() -> None:
    bench = CopyBench()
    (welcome, *_) = (one.message for one in bench.join(PODS[0]) if isinstance(one, Send))
    assert isinstance(welcome, Welcome)
    assert welcome.copies == 1


def test_a_job_that_does_not_use_it_is_told_nothing() -> None:
    bench = CopyBench(replace(SETTINGS, copies=0, across=""))
    assert bench.run_job(*PODS) == {}
    assert bench.coordinator.status(bench.now_s, str).memory is not None


def test_a_pod_whose_keeper_is_not_reached_is_told_nothing() -> None:
    bench = CopyBench(port=0)
    assert bench.run_job(*PODS) == {}


def test_an_agent_that_comes_back_is_told_again_at_once() -> None:
    bench = CopyBench()
    told = bench.run_job(*PODS)
    iteration = bench.status().iteration
    assert bench.buddies(bench.join(PODS[0], plan=None, term=1)) == {PODS[0]: told[PODS[0]]}
    assert bench.status().iteration == iteration
    bench.held[PODS[1]] = replace(bench.held[PODS[1]], port=0, host="")
    assert bench.buddies(bench.join(PODS[1])) == {}, "a new keeper that does not listen yet"


def test_a_lost_pod_changes_what_its_buddy_is_told_and_no_more_than_that() -> None:
    bench = CopyBench()
    told = bench.run_job(*PODS)
    buddy = told[PODS[0]].keepers[0].uid.removeprefix("uid-")
    bench.save(0, 10, told, *PODS)
    bench.settle()
    actions = bench.see_gone(PODS[0])
    actions += bench.all_are(WorkerPhase.READY, 0, *PODS[1:])
    actions += bench.tick(1.0)
    plans = [one.message for one in actions if isinstance(one, Send) and isinstance(one.message, Plan)]
    assert len(plans) == 4, bench.status().message
    (spare,) = (plan for plan in plans if plan.restore is not None and plan.restore.peers)
    assert spare.restore is not None
    (candidate,) = spare.restore.candidates
    assert candidate.fetches == ((0, 1, 0, f"uid-{buddy}"),)
    assert [peer.uid for peer in spare.restore.peers] == [f"uid-{buddy}"]
    actions += bench.all_are(WorkerPhase.RUNNING, 1, *PODS[1:])
    news = bench.buddies(actions + bench.tick(1.1))
    assert set(news) == {buddy, PODS[4]}
    assert news[buddy].drop == (), "it is the only copy"
    assert [peer.uid for peer in news[PODS[4]].keepers] == [f"uid-{buddy}"]
    # Once a later step is protected, the copies of the lost pod are of no use any more.
    now = {**told, **news}
    kept = bench.held[buddy].copies
    bench.save(1, 20, now, *PODS[1:])
    bench.tell(buddy, replace(bench.held[buddy], copies=(*bench.held[buddy].copies, *kept)))
    news = bench.settle() | bench.buddies(bench.tick(6.0))
    assert {pod: one.drop for pod, one in news.items() if one.drop} == {buddy: ("uid-digits-0",)}
    bench.tell(buddy, replace(bench.held[buddy], copies=bench.held[buddy].copies[:1]))
    assert bench.buddies(bench.tick(6.0))[buddy].drop == ()
    assert bench.coordinator._job.copying.due_s is None, "nothing is waited for any more"


def test_the_status_says_what_a_protected_step_outlives() -> None:
    bench = CopyBench()
    told = bench.run_job(*PODS)
    memory = bench.status().memory
    assert memory is not None
    assert (memory.protected_step, memory.across) == (-1, "across rack")
    bench.save(0, 10, told, *PODS)
    bench.settle()
    memory = bench.status().memory
    assert memory is not None
    assert memory.protected_step == 10


def test_one_rack_alone_is_told_with_what_is_left() -> None:
    bench = CopyBench()
    bench.racks = dict.fromkeys(PODS, "r1")
    told = bench.run_job(*PODS)
    bench.save(0, 10, told, *PODS)
    bench.settle()
    memory = bench.status().memory
    assert memory is not None
    assert (memory.protected_step, memory.across) == (10, "no other rack: across host")


def test_a_rack_that_is_not_known_is_told_and_its_copies_are_promised_across_hosts() -> None:
    """It may be the rack of whoever keeps its copies."""
    bench = CopyBench(replace(SETTINGS, spares=0))
    bench.racks = RACKS | {"digits-0": ""}
    told = bench.run_job(*PODS[:4])
    bench.save(0, 10, told, *PODS[:4])
    bench.settle()
    memory = bench.status().memory
    assert memory is not None
    assert (memory.protected_step, memory.across) == (10, "rack of 1 pod is not known: across host")


def test_the_status_names_a_pod_that_cannot_be_copied() -> None:
    bench = CopyBench()
    bench.run_job(*PODS)
    problem = ("uid-digits-2", "no room: 4 MB of 4 MB are used")
    bench.tell(PODS[0], replace(bench.held[PODS[0]], problems=(problem,)))
    memory = bench.status().memory
    assert memory is not None
    assert memory.across == "across rack; digits-0 is not copied to digits-2: no room: 4 MB of 4 MB are used"


def test_too_few_pods_are_told_with_their_number() -> None:
    bench = CopyBench(replace(SETTINGS, copies=3, replicas=2, spares=0))
    bench.run_job(*PODS[:2])
    memory = bench.status().memory
    assert memory is not None
    assert memory.across == "2 pods have too few others to keep copies, want 3"


def test_a_pod_that_is_lost_in_a_recovery_moves_no_copies_before_it_is_over() -> None:
    bench = CopyBench()
    bench.run_job(*PODS)
    actions = bench.fault(PODS[0], 0, Cause.EXCEPTION)
    actions += bench.see_gone(PODS[0])
    assert bench.buddies(actions + bench.tick(2.0)) == {}


def pinned(told: dict[str, Buddies]) -> set[tuple[tuple[int, ...] | None, tuple[int, ...] | None]]:
    return {(one.protected, one.next_protected) for one in told.values()}


def test_a_complete_step_is_pinned_until_it_is_protected_and_then_until_the_next_is() -> None:
    bench = CopyBench()
    told = bench.run_job(*PODS)
    nobody = {pod: replace(one, owners=()) for pod, one in told.items()}
    bench.save(0, 10, nobody, *PODS)
    news = bench.settle()
    assert news.keys() == set(PODS)
    assert pinned(news) == {(None, (0, 1, 10, 4))}
    bench.save(0, 10, told, *PODS)
    assert pinned(bench.settle()) == {((0, 1, 10, 4), None)}
    # A later one that no pod has copied yet: both are needed.
    own = {pod: bench.held[pod] for pod in PODS}
    bench.save(0, 20, nobody, *PODS)
    for pod in PODS:
        now = bench.held[pod]
        bench.tell(pod, replace(now, holdings=(*own[pod].holdings, *now.holdings), copies=own[pod].copies))
    assert pinned(bench.settle()) == {((0, 1, 10, 4), (0, 1, 20, 4))}


def test_a_step_is_protected_only_once_every_keeper_says_that_it_stays() -> None:
    """One that has not heard it yet may overwrite its copy with the next."""
    bench = CopyBench()
    told = bench.run_job(*PODS)
    bench.save(0, 10, told, *PODS)
    bench.settle()
    bench.save(0, 20, told, *PODS)
    bench.tick(0.2)
    bench.tell(PODS[1], replace(bench.held[PODS[1]], pinned=((0, 1, 10, 4),)))
    bench.tick(0.2)
    memory = bench.status().memory
    assert memory is not None
    assert (memory.complete_step, memory.protected_step) == (20, -1), "step 10 is nowhere any more"
    bench.tell(PODS[1], replace(bench.held[PODS[1]], pinned=((0, 1, 20, 4),)))
    bench.tick(0.2)
    memory = bench.status().memory
    assert memory is not None
    assert memory.protected_step == 20


def test_a_step_that_was_protected_stays_pinned_when_a_pod_with_a_part_of_it_is_lost() -> None:
    bench = CopyBench()
    told = bench.run_job(*PODS)
    bench.save(0, 10, told, *PODS)
    bench.settle()
    actions = bench.see_gone(PODS[0])
    actions += bench.all_are(WorkerPhase.READY, 0, *PODS[1:])
    actions += bench.all_are(WorkerPhase.RUNNING, 1, *PODS[1:])
    bench.tick(1.1)
    bench.settle()
    memory = bench.status().memory
    assert memory is not None
    assert memory.protected_step == -1, "one pod more, and a part of it may be gone"
    assert {one.protected for one in bench.coordinator._job.copying.told.values()} == {(0, 1, 10, 4)}


def test_a_step_of_which_a_part_was_lost_with_the_pod_that_saved_it_costs_no_saves() -> None:
    """Seen before: ranks that had it beside the protected one skipped all saves for half a minute."""
    bench = CopyBench()
    told = bench.run_job(*PODS)
    bench.save(0, 10, told, *PODS)
    bench.settle()
    before = {pod: bench.held[pod] for pod in PODS}
    buddy = told[PODS[0]].keepers[0].uid.removeprefix("uid-")
    bench.save(0, 20, {pod: one if pod == buddy else replace(one, owners=()) for pod, one in told.items()}, *PODS)
    for pod in PODS:
        now = bench.held[pod]
        both = replace(now, holdings=now.holdings + before[pod].holdings, copies=now.copies + before[pod].copies)
        bench.tell(pod, both)
    assert pinned(bench.settle()) == {((0, 1, 10, 4), (0, 1, 20, 4))}

    actions = bench.see_gone(PODS[0])
    actions += bench.all_are(WorkerPhase.READY, 0, *PODS[1:])
    actions += bench.all_are(WorkerPhase.RUNNING, 1, *PODS[1:])
    news = told | bench.buddies(actions + bench.tick(1.1)) | bench.settle()

    memory = bench.status().memory
    assert memory is not None
    assert memory.complete_step == 20, "its copy is left"
    assert pinned({pod: news[pod] for pod in PODS[1:]}) == {((0, 1, 10, 4), None)}
    # What all ranks save next is copied at once.
    bench.save(1, 30, {pod: replace(one, owners=()) for pod, one in news.items()}, *PODS[1:])
    assert {one.next_protected for one in bench.settle().values()} == {(1, 1, 30, 4)}
    bench.save(1, 30, news, *PODS[1:])
    bench.settle()
    memory = bench.status().memory
    assert memory is not None
    assert memory.protected_step == 30


def test_a_step_is_protected_though_a_pod_that_saved_a_part_of_it_is_lost_once_enough_copies_are_there() -> None:
    bench = CopyBench(replace(SETTINGS, copies=1, spares=2))
    told = bench.run_job(*PODS)
    table = bench.coordinator._job.checkpoints
    bench.save(0, 10, told, *PODS)
    key = max(table.steps)
    assert table.may_be_protected(key, 1, ())
    assert not table.may_be_protected(key, 2, ())
    assert table.may_be_protected(key, 2, {f"uid-{pod}" for pod in PODS})
    assert not table.may_be_protected(key, 2, {f"uid-{pod}" for pod in PODS[1:]})
    assert not table.may_be_protected(key._replace(step=11), 1, {f"uid-{pod}" for pod in PODS})


def test_a_pod_without_any_other_keeps_no_step_for_copies() -> None:
    """Seen before: all its saves were skipped for half a minute, and seven of eight from then on."""
    bench = CopyBench(replace(SETTINGS, replicas=2, ranks_per_pod=2, min_replicas=1, spares=0))
    told = bench.run_job(*PODS[:2])
    bench.save(0, 10, told, *PODS[:2])
    bench.settle()
    before = {pod: bench.held[pod] for pod in PODS[:2]}
    bench.save(0, 20, {pod: replace(one, owners=()) for pod, one in told.items()}, *PODS[:2])
    for pod in PODS[:2]:
        now = bench.held[pod]
        both = replace(now, holdings=now.holdings + before[pod].holdings, copies=before[pod].copies)
        bench.tell(pod, both)
    assert len(pinned(bench.settle())) == 1
    copying = bench.coordinator._job.copying
    assert copying.safe is not None
    assert copying.next is not None

    actions = bench.tell(PODS[1], replace(bench.held[PODS[1]], port=0, host=""))
    news = bench.buddies(actions + bench.tick(1.1)) | bench.settle()

    assert (news[PODS[0]].protected, news[PODS[0]].next_protected, news[PODS[0]].keepers) == (None, None, ())


def test_nothing_waits_for_a_step_that_cannot_be_copied() -> None:
    bench = CopyBench()
    told = bench.run_job(*PODS)
    bench.tell(PODS[0], replace(bench.held[PODS[0]], problems=(("uid-digits-2", "no room"),)))
    bench.save(0, 10, {pod: replace(one, owners=()) for pod, one in told.items()}, *PODS)
    assert bench.settle() == {}
    bench.tell(PODS[0], replace(bench.held[PODS[0]], problems=()))
    assert pinned(bench.settle()) == {(None, (0, 1, 10, 4))}


def test_ranks_that_fetch_from_a_pod_without_ranks_are_told_at_once_that_it_is_lost() -> None:
    """Seen before: nobody said so, since no rank was lost with it, and a keeper waited 5 s for that of the lost pod."""
    pods = PODS[:4]
    bench = CopyBench(replace(SETTINGS, replicas=2, ranks_per_pod=2, min_replicas=1, spares=2))
    told = bench.run_job(*pods)
    holder, taker = "digits-3", "digits-2"
    assert told[holder].owners == ("uid-digits-1",)
    bench.save(0, 10, told, *pods)
    bench.settle()
    actions = bench.see_gone("digits-1")
    actions += bench.all_are(WorkerPhase.READY, 0, "digits-0", taker, holder)
    actions += bench.tick(1.0)
    plans = [one.message for one in actions if isinstance(one, Send) and isinstance(one.message, Plan)]
    (plan,) = (plan for plan in plans if plan.restore is not None and plan.restore.peers)
    assert plan.restore is not None
    assert [peer.uid for peer in plan.restore.peers] == [f"uid-{holder}"]
    assert all(part.rank is not None for part in plan.ranks)
    left = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", (RACKS[pod],)) for pod in ("digits-0", taker)}

    news = bench.buddies(bench.step(Observed(Observation(left, is_accounted=True))))

    assert {pod: one.lost for pod, one in news.items() if pod != holder} == {
        "digits-0": (f"uid-{holder}",),
        taker: (f"uid-{holder}",),
    }
    # It is the same iteration: what is told again does not forget it.
    assert bench.status().iteration == plan.iteration
    assert bench.buddies(bench.tick(2.0)).get(taker, news[taker]).lost == (f"uid-{holder}",)
    # Should it come back, its keeper is worth a wait again.
    back = left | {f"uid-{holder}": PodObservation(holder, f"node-{holder}", (RACKS[holder],))}
    actions = bench.step(Observed(Observation(back, is_accounted=True))) + bench.join(holder)
    assert bench.buddies(actions)[taker].lost == ()


def test_nobody_is_told_of_a_lost_pod_from_which_nobody_fetches() -> None:
    bench = CopyBench()
    bench.run_job(*PODS)
    gone = "digits-4"
    actions = bench.see_gone(gone)
    assert all(one.lost == () for one in bench.buddies(actions + bench.tick(2.0)).values())


def test_copies_of_a_pod_that_is_lost_soon_after_a_new_rendezvous_began_are_known() -> None:
    """Seen before: a protected step was lost with one pod, since its copies were asked about while it still counted."""
    plans: dict[str, Plan] = {}

    class Noting(CopyBench):
        def step(self, event: Any) -> list[Action]:
            actions = super().step(event)
            by_session = {session: pod for pod, session in self.sessions.items()}
            plans.update(
                (by_session[one.session], one.message)
                for one in actions
                if isinstance(one, Send) and isinstance(one.message, Plan)
            )
            return actions

    before = Noting()
    told = before.run_job(*PODS)
    before.save(0, 10, told, *PODS)
    bench = CopyBench()
    for pod, held in before.held.items():
        # Nobody confirms the copies of a step that its owner has overwritten: they are put off.
        older = tuple(replace(one, step=4) for one in held.copies)
        bench.held[pod] = replace(held, copies=held.copies + older)
    for pod in PODS:
        bench.join(pod, plan=plans[pod], term=1)
    newest = max(bench.coordinator._job.checkpoints.steps)
    (rank,) = next(one.ranks for one in bench.status().pods if one.pod == PODS[0])
    assert bench.buddies(bench.see_gone(PODS[0])) == {}, "nothing was asked for yet"
    step = bench.coordinator._job.checkpoints.steps[newest]
    assert (newest.step, step.num_verified) == (10, 4)
    assert step.holders[rank].keys() == {one.uid for one in told[PODS[0]].keepers}
