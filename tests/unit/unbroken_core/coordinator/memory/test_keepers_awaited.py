"""After a fault a plan waits for keepers that alone have a part of the newest step, where they may come back."""

from dataclasses import replace

from tests.unit.unbroken_core.coordinator.memory.test_buddies_told import PODS, RACKS, CopyBench

from unbroken_core.coordinator.copying import KEEPERS_AWAITED_S
from unbroken_core.coordinator.events import Action, AgentDisconnected, Observed, Send
from unbroken_core.protocol.messages import Observation, Plan, PodObservation
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

READY = WorkerPhase.READY
OWNER = PODS[0]
GRACE_S = 1.1
"""A pod whose connection is broken is lost after a second, once the others have left."""


def restored(actions: list[Action]) -> set[int] | None:
    """Return the steps that a plan names, of all of its pods; None: no plan was made."""
    plans = [one.message for one in actions if isinstance(one, Send) and isinstance(one.message, Plan)]
    if not plans:
        return None
    return {found.step for plan in plans if plan.restore is not None for found in plan.restore.candidates}


class TwoLost:
    """Step 10 is protected; then the agent of the pod with the copies of another is killed, and that other one lost."""

    def __init__(self) -> None:
        self.bench = CopyBench()
        told = self.bench.run_job(*PODS)
        self.buddy = told[OWNER].keepers[0].uid.removeprefix("uid-")
        self.others = [pod for pod in PODS if pod not in (OWNER, self.buddy)]
        self.bench.save(0, 10, told, *PODS)
        self.bench.settle()
        self.whole = self.bench.held[self.buddy]
        self.bench.step(AgentDisconnected(self.bench.sessions.pop(self.buddy)))

    def lose_owner(self) -> list[Action]:
        """The other pod is no more, and who is left has left the iteration; its agent's time is over."""
        actions = self.bench.see_gone(OWNER)
        actions += self.bench.all_are(READY, 0, *self.others)
        return actions + self.bench.tick(GRACE_S)

    def come_back(self) -> list[Action]:
        """A new agent, whose keeper has not said anything yet."""
        self.bench.held[self.buddy] = replace(self.whole, port=0, host="", copies=(), pinned=())
        self.bench.states[self.buddy] = self.bench.workers_of(self.buddy, READY, 0)
        return self.bench.join(self.buddy, term=1)


def test_a_plan_waits_for_the_keeper_that_comes_back_with_its_agent() -> None:
    """Seen before: all ranks began anew, though the copies were there a second later."""
    both = TwoLost()
    assert restored(both.lose_owner()) is None
    message = both.bench.status().message
    assert message.startswith(f"waits for {both.buddy} to be heard again, where alone the newest checkpoint in memory")
    assert "; otherwise goes on without it, at " in message, "what the time is that follows"
    assert restored(both.come_back() + both.bench.tick(0.5)) is None
    assert restored(both.bench.tell(both.buddy, both.whole) + both.bench.tick(1.0)) == {10}


def test_a_keeper_that_does_not_come_back_is_waited_for_no_longer_than_that() -> None:
    both = TwoLost()
    assert restored(both.lose_owner() + both.bench.tick(KEEPERS_AWAITED_S - GRACE_S - 0.1)) is None
    assert restored(both.bench.tick(0.2)) == set()


def test_a_pod_that_is_no_more_is_not_waited_for() -> None:
    both = TwoLost()
    assert restored(both.lose_owner()) is None
    left = {f"uid-{pod}": PodObservation(pod, f"node-{pod}", (RACKS[pod],)) for pod in both.others}
    actions = both.bench.step(Observed(Observation(left, is_accounted=True)))
    assert restored(actions + both.bench.tick(0.1)) == set()


def test_where_all_can_be_read_without_a_pod_it_is_not_waited_for() -> None:
    """What it has saved lies with its buddy as well."""
    both = TwoLost()
    actions = both.bench.fault(both.others[0], 0, Cause.EXCEPTION)
    actions += both.bench.all_are(READY, 0, OWNER, *both.others)
    assert restored(actions + both.bench.tick(GRACE_S)) == {10}
