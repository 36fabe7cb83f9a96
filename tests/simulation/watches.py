"""What the watches of pods find, true or not, and whom the coordinator may blame for it."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from unbroken_core.coordinator.events import Action, Send
from unbroken_core.coordinator.state.phases import Running
from unbroken_core.protocol.messages import Interrupt, Plan, Respawn
from unbroken_core.protocol.settings import DEFAULT_RUNGS, HealthMode
from unbroken_core.recovery.health import BREAKER_S, BUDGET_S, MAX_BLAMED
from unbroken_core.vocabulary.findings import MATMUL, Finding, Health, Verdict
from unbroken_core.vocabulary.reasons import Cause

if TYPE_CHECKING:
    from tests.simulation.pod import Pod, Worker
    from tests.simulation.world import World

SOUND = Health((Finding("gpu", "", Verdict.OK),))
DEAD = Finding("gpu-events", "GPU-0", Verdict.FATAL, "xid-79", "reset", "it has fallen off the bus")
LOST = Finding("gpu", "GPU-0", Verdict.FATAL, "gpu-lost")
WORN = Finding("gpu", "GPU-0", Verdict.DEGRADED, "throttled")
HINT = Finding("pcie", "0000:17:00.0", Verdict.SUSPECT, "aer")
SURE = Finding("pcie", "0000:17:00.0", Verdict.SUSPECT, "aer", seen=2)
DOWN = Finding("ports", "mlx5_0:1", Verdict.SUSPECT, "link-down", seen=2)
WRONG = Finding(MATMUL, "GPU-0", Verdict.FATAL, "wrong-numbers")
MOST_RAISES = 4
"""So often dead devices make workers of a job raise; more would only use up what its script may fail without progress,
rightly: mostly nobody may take ranks from such a pod."""
PATIENCE_S = 15.0
"""Within that time a pod that can be blamed is."""


def speaks(health: Health) -> bool:
    """Return whether a finding speaks against its pod: a fatal one, or one that was seen twice."""
    (finding,) = health.findings
    return finding.verdict is Verdict.FATAL or (finding.verdict is Verdict.SUSPECT and finding.seen > 1)


class FalseBlameError(AssertionError):
    """A pod is blamed that may not be, or is not blamed where nothing speaks against that."""


class Watches:
    """Ground truth of devices, and what is told of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.settings = world.settings
        self.is_on = world.schedule.has_watches
        self.random = random.Random(f"watches {world.schedule.seed}")
        self.told: dict[str, Health] = {}
        """What each watch says, by uid of its pod."""
        self.failed: set[str] = set()
        """Pods whose preflight has failed."""
        self.spoken: set[str] = set()
        """Pods against which something has ever spoken."""
        self.broken: set[str] = set()
        """Pods with a dead device."""
        self.num_raised = 0
        """How often one has made a worker raise."""
        self.num_blamed = 0
        self._unfit: set[str] = set()
        self._blames: list[tuple[float, str]] = []
        """Of this life of the rendezvous."""
        self._counted: list[tuple[float, str]] = []
        """Those that count in the budget."""
        self._vain_s: list[float] = []
        """When blames were taken back since nobody could take the ranks any more."""
        self._blamed_ever: set[str] = set()
        """Names of pods that were blamed in any life: the next one goes on with the recovery of the one before."""
        self._moved: tuple[int, float] | None = None
        """Ranks of the world from which a pod was taken for what was found, and when."""
        self._due: tuple[str, float] | None = None
        """Who has to be blamed, and since when."""

    # --------------------------------------------------------------------------------------------------- what is found

    def begin(self, pod: Pod) -> None:
        """A pod is there; it has tested itself where the job wants that."""
        if self.is_on and self.settings.preflight is not HealthMode.OFF and self.random.random() < 0.1:
            self.failed.add(pod.uid)
            self.world.guilty_pods.add(pod.uid)

    def of(self, pod: Pod) -> Health | None:
        """Return what an agent tells of its pod."""
        if not self.is_on:
            return None
        health = self.told.get(pod.uid, SOUND)
        return Health((*health.findings, WRONG)) if pod.uid in self.failed else health

    def find(self, pod: Pod, finding: Finding, lasts_s: float | None) -> None:
        """The watch of a pod finds something, for a while or for ever."""
        if not pod.is_alive:
            return
        self.told[pod.uid] = Health((finding,))
        self.world.guilty_pods.add(pod.uid)
        if speaks(self.told[pod.uid]):
            self.spoken.add(pod.uid)
        self.world.tell(f"the watch of {pod.name} finds {finding.code} ({finding.verdict})")
        pod.report()
        if lasts_s is not None:
            self.world.after(lasts_s, partial(self._clear, pod, finding), "")

    def _clear(self, pod: Pod, finding: Finding) -> None:
        if pod.is_alive and self.told.get(pod.uid) == Health((finding,)):
            self.told[pod.uid] = SOUND
            self.world.tell(f"the watch of {pod.name} finds nothing any more")
            pod.report()

    def break_device(self, pod: Pod) -> None:
        """A device of a pod dies: who trains on it raises, and the watch says so a moment earlier or later."""
        self.broken.add(pod.uid)
        self.world.after(self.random.uniform(0.0, 2.0), lambda: self.find(pod, DEAD, None), "")
        for worker in pod.workers:
            self.entered(pod, worker)

    def entered(self, pod: Pod, worker: Worker) -> None:
        """A worker enters the training function, perhaps on a dead device."""
        if pod.uid in self.broken and self.num_raised < MOST_RAISES:
            again = partial(self._raise, pod, worker, worker.iteration)
            self.world.after(self.random.uniform(0.0, 2.0), again, "")

    def _raise(self, pod: Pod, worker: Worker, iteration: int) -> None:
        if worker.iteration == iteration and self.num_raised < MOST_RAISES and pod.is_alive:
            self.num_raised += 1
            self.world.note_guilt(pod, worker, "finds its device dead")
            pod.raise_exception(worker, "RuntimeError: the device is lost")

    # ------------------------------------------------------------------------------------------------------ what holds

    def forget(self) -> None:
        """The rendezvous was restarted: it knows nothing of earlier blames."""
        self._unfit.clear()
        self._blames.clear()
        self._counted.clear()
        self._vain_s.clear()
        self._moved = self._due = None

    def check(self, actions: list[Action]) -> None:
        """Check whom one step of the coordinator has blamed, and for what it moves ranks."""
        coordinator = self.world.coordinator
        if coordinator is None or not self.is_on:
            return
        unfit = set(coordinator._job.members.unfit)
        for uid in self._unfit - unfit:
            self._note_acquittal(uid)
        for uid in unfit - self._unfit:
            self._check_blame(uid)
        before, self._unfit = self._unfit, unfit
        self._check_orders(actions, before)
        self._check_whole(actions)
        self._check_due()
        if isinstance(coordinator._job.phase, Running):
            self._replace_unfit()

    def _note_acquittal(self, uid: str) -> None:
        """Give its place in the budget back to a pod that is blamed no more although the finding stands."""
        coordinator = self.world.coordinator
        job = None if coordinator is None else coordinator._job
        if job is None or uid not in job.members.by_uid or not job.health.is_doubted(uid):
            return
        self._vain_s.append(self.world.now_s)
        last = max(at_s for at_s, other in self._counted if other == uid)
        self._counted.remove((last, uid))

    def _has_failed(self, uid: str) -> bool:
        """Return whether the pod's preflight may speak against it: by its own checks, or by tests with others."""
        return uid in self.failed or uid in self.world.pairing.bad

    def _num_vain(self) -> int:
        return sum(self.world.now_s < at_s + BREAKER_S for at_s in self._vain_s)

    def _check_blame(self, uid: str) -> None:
        now_s, pod = self.world.now_s, self.world.pods[uid]
        by_watch = uid in self.spoken and self.settings.health is HealthMode.ACT
        by_preflight = self._has_failed(uid) and self.settings.preflight is HealthMode.ACT
        if not by_watch and not by_preflight:
            raise FalseBlameError(f"{pod.name} is called broken, and nothing says so that counts")
        self.num_blamed += 1
        watched = [
            (at_s, other) for at_s, other in self._blames if now_s < at_s + BREAKER_S and not self._has_failed(other)
        ]
        if by_watch and not by_preflight and any(other != uid for _at_s, other in watched):
            raise FalseBlameError(f"{pod.name} is blamed so soon after another one: {watched}")
        if self._num_vain() >= MAX_BLAMED:
            raise FalseBlameError(f"{pod.name} is blamed after spares were lost again and again: {self._vain_s}")
        self._blames.append((now_s, uid))
        self._counted.append((now_s, uid))
        self._blamed_ever.add(pod.name)
        recent = [at_s for at_s, _uid in self._counted if now_s < at_s + BUDGET_S]
        if len(recent) > MAX_BLAMED:
            raise FalseBlameError(f"{len(recent)} pods are blamed within {BUDGET_S:g} s: {recent}")

    def _check_orders(self, actions: list[Action], unfit_before: set[str]) -> None:
        """Check that nobody stops training without a pod that is blamed, and that such a pod gets nothing more."""
        for action in actions:
            if not isinstance(action, Send):
                continue
            uid, message = self.world.connections[action.session].pod.uid, action.message
            if (
                isinstance(message, Interrupt)
                and message.cause is Cause.DEVICE_FAULT
                and message.pod not in self._blamed_ever
            ):
                raise FalseBlameError(f"nobody is blamed: {message}")
            # In the step that blames it, processes may have been ordered before.
            if isinstance(message, Respawn) and uid in self._unfit & unfit_before:
                raise FalseBlameError(f"{uid} is called broken, and gets processes: {message}")
            if not isinstance(message, Plan) or message.iteration <= self.world.ledger.newest_before:
                continue
            if uid in self._unfit and any(part.rank is not None for part in message.ranks):
                raise FalseBlameError(f"{uid} is called broken, and gets ranks: {message}")

    def _check_whole(self, actions: list[Action]) -> None:
        """Check that a move for what was found makes no world smaller."""
        world, coordinator = self.world, self.world.coordinator
        incident = None if coordinator is None else coordinator._job.history.running
        iteration = None if incident is None else incident.iteration_before
        for action in actions:
            if not isinstance(action, Send):
                continue
            message = action.message
            if isinstance(message, Interrupt) and message.cause is Cause.DEVICE_FAULT:
                if message.iteration != iteration:
                    continue  # In the next iterations of a recovery other faults may come.
                # Of whom nobody has heard yet, or who is away, may be lost as well.
                self._moved = None
                if self._are_heard(message.iteration):
                    self._moved = world.world_sizes.get(message.iteration, 0), world.now_s
            elif isinstance(message, Plan) and self._moved is not None:
                (size, at_s), self._moved = self._moved, None
                is_calm = world.disturbed_s < at_s and not world.cordoned
                if is_calm and message.world_size < size:
                    raise FalseBlameError(f"a finding makes {message.world_size} ranks of {size}: {message}")

    def _are_heard(self, iteration: int) -> bool:
        """Whether all pods of an iteration are there, as far as anybody can know."""
        pods = [pod for pod, _worker in self.world.entries.get(iteration, {}).values()]
        return all(pod.is_alive and pod.is_agent_up and pod.is_welcome and pod.can_hear for pod in pods)

    def _check_due(self) -> None:
        """Check that a pod with a dead device is blamed where a spare is ready and nothing speaks for a false alarm."""
        uid, now_s = self._culprit(), self.world.now_s
        if uid is None or self._due is None or self._due[0] != uid:
            self._due = None if uid is None else (uid, now_s)
        elif now_s > self._due[1] + PATIENCE_S:
            raise FalseBlameError(f"{uid} has a dead device since {self._due[1]:.1f} s, a spare is ready, and it stays")

    def _culprit(self) -> str | None:
        """Return the only pod that something speaks against, where it has to be blamed."""
        world, coordinator = self.world, self.world.coordinator
        settings, found = self.settings, [uid for uid, health in self.told.items() if speaks(health)]
        found = [uid for uid in found if world.pods[uid].is_alive]
        if coordinator is None or settings.health is not HealthMode.ACT or len(found) != 1:
            return None
        (uid,) = found
        job, fatal = coordinator._job, self.told[found[0]].findings[0].verdict is Verdict.FATAL
        lately = {other for at_s, other in self._blames if world.now_s < at_s + BREAKER_S}
        counted = sum(world.now_s < at_s + BUDGET_S for at_s, _uid in self._counted)
        is_spent = max(counted, self._num_vain()) >= MAX_BLAMED
        is_free = not settings.layers and settings.rungs == DEFAULT_RUNGS and settings.max_faults_per_rank is None
        spares = [uid for uid in job.members.ready if uid not in job.members.active and not self._has_failed(uid)]
        sound = [other for other in spares if other not in job.set_aside]
        can_take = uid in job.members.by_uid and sum(len(job.members.ready[other]) for other in sound) >= len(
            job.members.by_uid[uid].ranks
        )
        # Without it enough pods must be left.
        num_kept = sum(other not in job.members.out for other in job.members.active) - 1
        is_free = is_free and num_kept + len(spares) >= settings.minimum_replicas
        is_heard = world.pods[uid].is_welcome and world.pods[uid].can_hear and uid in job.members.active
        can_be = is_free and fatal and is_heard and not lately - {uid} and not is_spent and bool(sound) and can_take
        return uid if can_be and isinstance(job.phase, Running) and uid not in self._unfit else None

    def _replace_unfit(self) -> None:
        """Let the operator delete who is called broken and has no ranks, as soon as it has heard of it."""
        coordinator = self.world.coordinator
        members = {} if coordinator is None else coordinator._job.members.by_uid
        for uid in self._unfit:
            pod, member = self.world.pods[uid], members.get(uid)
            if pod.is_alive and member is not None and not member.ranks and not pod.is_leaving:
                pod.leave()
