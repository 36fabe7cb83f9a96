"""What must hold after every step of the coordinator, whatever happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unbroken_core.coordinator.events import Action, AgentReported, Event, Send, Tick
from unbroken_core.coordinator.state.phases import Interrupted, Running
from unbroken_core.protocol.messages import (
    Finish,
    Heartbeat,
    Hello,
    Interrupt,
    Plan,
    Policy,
    Recovery,
    Report,
    Respawn,
    Welcome,
)
from unbroken_core.vocabulary.reasons import Cause, JobPhase, RankReason, Reason, Rung, WorkerPhase

if TYPE_CHECKING:
    from tests.simulation.pod import Pod, Worker
    from tests.simulation.world import World


class Violation(AssertionError):
    """Something that must hold does not."""


WAITING = (JobPhase.FORMING, JobPhase.PLANNED, JobPhase.INTERRUPTED)
NO_RANK = frozenset((RankReason.RESERVE, RankReason.STEPPED_ASIDE, RankReason.LOST))
GOT_RANK = frozenset((RankReason.REPLACED, RankReason.RETURNED, RankReason.ASSIGNED))
KEPT_RANK = frozenset((RankReason.KEPT,))
MOVED_RANK = frozenset((RankReason.SHIFTED, RankReason.FILLED_GAP, RankReason.ASSIGNED))
PLANNED = (Cause.POD_LEAVING, Cause.CAPACITY_RETURNED, Cause.DEVICE_FAULT)
"""Causes that may wait for a common step."""
INSIDE = (WorkerPhase.RUNNING, WorkerPhase.STOPPING, WorkerPhase.COMPLETED)


class Ledger:
    """Remembers every plan that was sent, and compares."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.plans: dict[int, dict[tuple[str, int], int | None]] = {}
        """Ranks by place by iteration."""
        self.frames: dict[int, tuple[int, str, int]] = {}
        self.newest = self.newest_before = -1
        """Iteration of the newest plan, now and before the last step."""
        self.is_new_life = False
        """The rendezvous was restarted, and has neither cut a plan nor taken one over since."""
        self.has_taken_over = False
        self.doomed: set[tuple[str, int, int]] = set()
        """Places and incarnations that the job rung was to start again; an agent that was away hears of it later."""
        self.job_rung_of: float | None = None
        """When the last interruption began that came to the job rung."""
        self.rung = Rung.IN_PROCESS
        self.waiting_since_s: float | None = 0.0
        self.waiting_after = -1
        """The newest iteration when that wait began: a plan ends it, and what follows its failure is another one."""
        self.num_named = self.num_unnamed = 0
        """Hangs of which the one that hangs is named, and of which it is not known."""
        self.num_recoveries = 0
        self.num_common = 0
        """Moves after a step that all ranks had finished and saved."""
        self.num_growths = 0
        """Those of them by which the job grew back."""
        self.common: dict[int, int] = {}
        """That step by iteration."""
        self.ran: set[int] = set()
        """Iterations that all workers have entered, as the coordinator knows."""
        self.judged = 0
        self.heard_ends: set[tuple[str, int]] = set()
        """Uids and local ranks whose end, after the training function, this rendezvous has heard of."""

    def note_ends(self, pod: Pod, message: Hello | Report | Heartbeat) -> None:
        """Note of whose end the rendezvous has heard."""
        if not isinstance(message, Heartbeat):
            self.heard_ends.update((pod.uid, state.local_rank) for state in message.workers if state.has_ended)

    def forget(self) -> None:
        """The rendezvous was restarted: recoveries are counted anew, plans are not."""
        self.judged = 0
        self.heard_ends.clear()
        self.rung = Rung.IN_PROCESS
        self.waiting_since_s = self.world.now_s
        self.is_new_life = True
        # An order of which nobody has heard is lost with its rendezvous: the next one lets the iteration go on.
        self.common = {iteration: step for iteration, step in self.common.items() if self._is_told(iteration)}

    def _is_told(self, iteration: int) -> bool:
        pods = [self.world.pods[uid] for uid in self.pods_of(iteration)]
        return any(pod.interrupted >= iteration for pod in pods)

    def check_step(self, event: Event, actions: list[Action]) -> None:
        """Check one step of the coordinator."""
        self.newest_before = self.newest
        plans = [(a.session, a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, Plan)]
        coordinator = self.world.coordinator
        self.has_taken_over |= coordinator is not None and coordinator.phase is JobPhase.FORMING and self.newest >= 0
        if self.is_new_life:
            self._begin_life([plan for _session, plan in plans])
        fresh = [(session, plan) for session, plan in plans if plan.iteration > self.newest]
        if fresh:
            self._check_cut(fresh)
        for session, plan in plans:
            self._check_plan(session, plan)
        self._check_waits(event)
        self._check_moves(actions)
        if coordinator is not None and coordinator.phase is JobPhase.RUNNING:
            self.ran.add(coordinator._job.world.iteration)
        self._check_blame()
        self.rung = self._running_rung()
        self._note_job_rung()
        self._check_respawns(actions)

    def _begin_life(self, plans: list[Plan]) -> None:
        """Tell a first plan, which may reuse the number of one that nobody lives to tell of, from an adoption."""
        coordinator = self.world.coordinator
        if coordinator is None or coordinator.phase is JobPhase.FORMING:
            return
        self.is_new_life = False
        iteration = coordinator.status(self.world.now_s, str).iteration
        num_ranks = sum(part.rank is not None for plan in plans for part in plan.ranks)
        is_cut = any(plan.iteration == iteration and plan.world_size == num_ranks for plan in plans)
        self.newest = iteration - 1 if is_cut else iteration

    def _note_job_rung(self) -> None:
        """Note whose processes are to be started again; one recovery may come to that several times."""
        phase = None if self.world.coordinator is None else self.world.coordinator._job.phase
        if not isinstance(phase, Interrupted) or phase.job_rung_began is None or phase.at_s == self.job_rung_of:
            return
        self.job_rung_of = phase.at_s
        pods = self.world.pods.values()
        self.doomed = {(pod.uid, worker.local_rank, worker.incarnation) for pod in pods for worker in pod.workers}

    def _running_rung(self) -> Rung:
        coordinator = self.world.coordinator
        if coordinator is None or coordinator.phase not in WAITING:
            return Rung.IN_PROCESS
        history = coordinator.history
        last = history.running or (history.finished[-1] if history.finished else None)
        if last is not None and last.ended_s is None:
            return last.rung or Rung.IN_PROCESS
        return self.rung

    def _check_cut(self, fresh: list[tuple[str, Plan]]) -> None:
        iterations = {plan.iteration for _session, plan in fresh}
        if len(iterations) != 1:
            raise Violation(f"one step cut plans of several iterations: {iterations}")
        iteration = iterations.pop()
        frames = {(plan.world_size, plan.master_host, plan.master_port) for _session, plan in fresh}
        if len(frames) != 1:
            raise Violation(f"the plan of iteration {iteration} is not the same everywhere: {frames}")
        self._begin_iteration(iteration)
        self.frames[iteration] = frames.pop()
        before, self.newest = self.plans.get(self.newest, {}), iteration
        ledger: dict[tuple[str, int], int | None] = {}
        for session, plan in fresh:
            pod = self.world.connections[session].pod
            for part in plan.ranks:
                if (pod.uid, part.local_rank) in ledger:
                    raise Violation(f"{pod.name}/{part.local_rank} got two parts of iteration {iteration}")
                ledger[pod.uid, part.local_rank] = part.rank
        self.plans[iteration] = ledger
        ranks = sorted(rank for rank in ledger.values() if rank is not None)
        world_size = self.frames[iteration][0]
        if ranks != list(range(world_size)) or world_size < 1:
            raise Violation(f"iteration {iteration}: active ranks are {ranks}, want 0..{world_size - 1}")
        self._check_rules(iteration, ledger, world_size)
        self._check_domains(iteration, ledger)
        for session, plan in fresh:
            self._check_reasons(self.world.connections[session].pod, plan, before)
        self._check_ready(iteration, ledger)
        self._check_master(iteration, ledger)

    def _begin_iteration(self, iteration: int) -> None:
        """Forget what belongs to numbers that a rendezvous without memory uses again."""
        entered = [old for old in self.world.entries if old >= iteration]
        if entered and self.world.schedule.has_memory:
            raise Violation(f"iteration {iteration} is cut, some have entered {entered}")
        training = self.world.training
        for known in (self.world.entries, self.common, training.began_s, training.known):
            for old in [old for old in known if old >= iteration]:
                del known[old]
        self.ran.difference_update([old for old in self.ran if old >= iteration])

    def _check_rules(self, iteration: int, ledger: dict[tuple[str, int], int | None], world_size: int) -> None:
        settings = self.world.settings
        if world_size % settings.divisible_by:
            raise Violation(f"iteration {iteration}: {world_size} ranks are not divisible by {settings.divisible_by}")
        if settings.max_ranks is not None and world_size > settings.max_ranks:
            raise Violation(f"iteration {iteration}: {world_size} ranks, at most {settings.max_ranks} are allowed")
        pods = {uid for (uid, _local), rank in ledger.items() if rank is not None}
        asked = self.world.schedule.policy or Policy()
        is_cut_short = settings.max_ranks is not None or settings.divisible_by > 1 or asked.max_ranks is not None
        if len(pods) < settings.minimum_replicas and not is_cut_short:
            raise Violation(f"iteration {iteration}: {len(pods)} pods, want {settings.minimum_replicas}")
        if asked.max_ranks is not None and world_size > asked.max_ranks:
            raise Violation(f"iteration {iteration}: {world_size} ranks, the script allows {asked.max_ranks}")
        if settings.minimum_ranks_per_pod == settings.ranks_per_pod and not asked.code:
            for (uid, local_rank), rank in ledger.items():
                if rank is not None and rank % settings.ranks_per_pod != local_rank:
                    raise Violation(f"iteration {iteration}: {uid}/{local_rank} is rank {rank}: host order is broken")

    def _check_domains(self, iteration: int, ledger: dict[tuple[str, int], int | None]) -> None:
        """Check that no domain has more active ranks than its layer allows.

        Where a pod is that ended before the operator could tell of it, nobody knows; for whom it seems to live, it
        counts as of unknown place after timeouts.last_call (docs/topology.md). Who lives is told of before.
        """
        active = [self.world.pods[uid] for (uid, _local), rank in ledger.items() if rank is not None]
        placed = [pod for pod in active if pod.is_alive or pod.uid in self.world.told_of]
        for depth, layer in enumerate(self.world.settings.layers):
            domains = [pod.domains[depth] for pod in placed]
            for domain in set(domains):
                if layer.max_ranks is not None and domains.count(domain) > layer.max_ranks:
                    raise Violation(f"iteration {iteration}: {domains.count(domain)} ranks in {domain}: {layer}")

    def _check_reasons(self, pod: Pod, plan: Plan, before: dict[tuple[str, int], int | None]) -> None:
        """Check that each worker's word tells what became of its rank, and that ranks from elsewhere say from where."""
        origins = dict(plan.origins)
        for part in plan.ranks:
            if part.rank is None:
                allowed = NO_RANK
            elif part.reason is RankReason.FIRST:
                continue
            else:
                former = before.get((pod.uid, part.local_rank), part.rank)
                allowed = GOT_RANK if former is None else KEPT_RANK if former == part.rank else MOVED_RANK
                if (pod.uid, part.local_rank) not in before:
                    allowed = GOT_RANK | KEPT_RANK | MOVED_RANK  # It was away when the last plan was cut.
                if self.has_taken_over:
                    # Or when the job was taken over, perhaps with the plan before the last.
                    allowed |= GOT_RANK | MOVED_RANK | KEPT_RANK
            has_origin = part.reason in (RankReason.REPLACED, RankReason.FILLED_GAP)
            if part.reason not in allowed or has_origin != bool(origins.get(part.local_rank)):
                raise Violation(
                    f"iteration {plan.iteration}: {pod.name} is told {part} {origins}, want one of {allowed}"
                )

    def _check_ready(self, iteration: int, ledger: dict[tuple[str, int], int | None]) -> None:
        for (uid, local_rank), rank in ledger.items():
            pod = self.world.pods[uid]
            worker = pod.workers[local_rank]
            if rank is None or not pod.is_alive:
                continue
            is_told = pod.is_leaving and pod.is_welcome and not pod.is_muted and not pod.one_way
            # Its first report tells a new rendezvous, and is under way when it has just been welcomed.
            if is_told and self.world.now_s > max(pod.left_at_s, pod.welcomed_at_s) + 0.1:
                raise Violation(f"iteration {iteration} gives ranks to {pod.name}, which is leaving")
            if worker.phase in INSIDE:
                where = f"{pod.name}/{local_rank} is {worker.phase} in {worker.iteration}"
                raise Violation(f"iteration {iteration} was cut while {where}")

    def check_welcome(self, pod: Pod, message: Welcome, former: int) -> None:
        """Check that a new rendezvous comes with a higher term than its pods have seen."""
        if pod.epoch not in (-1, self.world.epoch) and former > 0 and message.term <= former:
            raise Violation(f"{pod.name} obeyed term {former}, a new rendezvous has {message.term}")
        pod.epoch = self.world.epoch

    def check_finish(self, message: Finish) -> None:
        """Check that a job is complete only when all of its workers are."""
        if message.outcome is JobPhase.COMPLETE:
            entries = self.world.entries[max(self.world.entries)]
            late = [
                pod.name
                for pod, worker in entries.values()
                if not worker.has_completed and worker.phase is not WorkerPhase.COMPLETED and pod.is_alive
            ]
            if late:
                raise Violation(f"the job is called complete while {late} still train")

    def _check_master(self, iteration: int, ledger: dict[tuple[str, int], int | None]) -> None:
        uid, local_rank = next(place for place, rank in ledger.items() if rank == 0)
        pod = self.world.pods[uid]
        worker = pod.workers[local_rank]
        endpoint = (self.frames[iteration][1], self.frames[iteration][2])
        if pod.is_alive and worker.phase is WorkerPhase.READY and endpoint != (pod.node, worker.port):
            raise Violation(f"iteration {iteration}: rank 0 listens at {pod.node}:{worker.port}, not at {endpoint}")

    def _check_plan(self, session: str, plan: Plan) -> None:
        pod = self.world.connections[session].pod
        ledger = self.plans.get(plan.iteration)
        if ledger is None:
            return
        if self.frames[plan.iteration][0] != plan.world_size:
            raise Violation(f"{pod.name} got another world of iteration {plan.iteration}: {plan}")
        for part in plan.ranks:
            if part.rank is not None and ledger.get((pod.uid, part.local_rank)) != part.rank:
                raise Violation(f"{pod.name}/{part.local_rank} got another rank of iteration {plan.iteration}: {part}")

    def _check_waits(self, event: Event) -> None:
        coordinator = self.world.coordinator
        if coordinator is None:
            return
        now_s = self.world.now_s
        deadline_s = coordinator.next_deadline_s()
        if coordinator.phase in WAITING and deadline_s is None and not self.world.lacks_pods:
            raise Violation(f"{coordinator.phase} without a deadline")
        if isinstance(event, Tick) and deadline_s is not None and deadline_s <= now_s:
            raise Violation(f"a tick at {now_s} changes nothing and asks for another at {deadline_s}")
        if coordinator.phase not in WAITING:
            self.waiting_since_s = None
            return
        if self.waiting_since_s is None or self.waiting_after != self.newest:
            self.waiting_since_s, self.waiting_after = now_s, self.newest
        waited_s = now_s - self.waiting_since_s
        if waited_s > self.world.schedule.patience_s:
            status = coordinator.status(now_s, str)
            raise Violation(f"{coordinator.phase} for {waited_s:.0f} s: {status.reason} {status.message}")

    def _check_respawns(self, actions: list[Action]) -> None:
        for action in actions:
            if not isinstance(action, Send) or not isinstance(action.message, Respawn):
                continue
            pod = self.world.connections[action.session].pod
            for local_rank, incarnation in action.message.places:
                worker = pod.workers[local_rank]
                if worker.incarnation == incarnation and pod.is_alive:
                    self.world.check_respawn(pod, worker, action.message)

    def _check_blame(self) -> None:
        coordinator = self.world.coordinator
        if coordinator is None or coordinator.phase is not JobPhase.RUNNING:
            return
        for incident in coordinator.history.finished:
            if incident.ended_s is None or incident.number <= self.judged:
                continue
            self.judged, recovery = incident.number, incident.to_message(str)
            self.num_recoveries += 1
            self._check_recovered(recovery)
            pods = [uid for uid, pod in self.world.pods.items() if pod.name == recovery.pod]
            self._check_named(recovery, pods)
            is_known = any(uid in self.world.guilty_pods for uid in pods) or not recovery.pod
            if is_known:
                continue
            if not any((uid, local) in self.world.guilty for uid in pods for local in self._locals(recovery)):
                raise Violation(f"a healthy worker is blamed: {recovery}")

    def _check_named(self, recovery: Recovery, pods: list[str]) -> None:
        """Check that only who has hung is named for a hang: those who wait are healthy."""
        words = recovery.detail
        if recovery.cause not in (Cause.SOFT_TIMEOUT, Cause.HARD_TIMEOUT):
            return
        self.num_unnamed += "rank not known" in words
        if "hung for" not in words and "not in a collective" not in words:
            return
        self.num_named += 1
        named = [(uid, local) for uid in pods for local in range(self.world.settings.ranks_per_pod)]
        if recovery.pod and not self.world.hung_ever.intersection(named):
            raise Violation(f"a rank that waited is named for a hang: {recovery}")

    def _check_recovered(self, recovery: Recovery) -> None:
        """Check that what is called recovered runs: every rank of the plan has entered the training function."""
        wanted = {rank for rank in self.plans.get(recovery.iteration_after, {}).values() if rank is not None}
        missing = wanted - set(self.world.entries.get(recovery.iteration_after, {}))
        if recovery.rung is None or missing:
            raise Violation(f"called recovered while ranks {missing} have not entered: {recovery}")

    def _locals(self, recovery: Recovery) -> list[int]:
        """Return which workers of its pod may be meant."""
        size, rank = self.world.settings.ranks_per_pod, recovery.rank
        if rank is None and recovery.cause in (Cause.SOFT_TIMEOUT, Cause.HARD_TIMEOUT):
            # Several ranks of the pod hang. Or a worker without a rank was asked for the rank assignment, in vain.
            return list(range(size))
        policy = self.world.schedule.policy
        is_anywhere = self.world.settings.minimum_ranks_per_pod < size or (policy is not None and policy.code)
        if rank is None or is_anywhere:
            return list(range(size)) if rank is not None else []
        return [rank % size]

    def _check_moves(self, actions: list[Action]) -> None:
        """Check that ranks move after a step that all have saved, and at another moment only when that cannot be."""
        orders = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Interrupt)]
        planned = [order for order in orders if order.cause in PLANNED]
        coordinator = self.world.coordinator
        phase = None if coordinator is None else coordinator._job.phase
        move = phase.move if isinstance(phase, Running) else None
        if move is not None and self.world.now_s > move.until_s:
            raise Violation(f"a move waits since {self.world.now_s - move.until_s:.1f} s after its time")
        incident = None if coordinator is None else coordinator._job.history.running
        if not planned or coordinator is None or incident is None or incident.iteration_before != planned[0].iteration:
            return  # In the next iterations of a recovery other faults may come.
        iteration = planned[0].iteration
        if iteration != coordinator._job.world.iteration:
            return  # Who comes back is told of the one that it knows.
        entries = self.world.entries.get(iteration, {})
        # What was found of a pod is said before it.
        if not planned[0].detail.rpartition("; ")[2].startswith("moves after step"):
            self._check_haste(iteration, planned[0])
            return
        if iteration not in self.ran:
            return  # A new rendezvous tells of the move that made the plan before.
        self.num_common += 1
        self.num_growths += planned[0].cause is Cause.CAPACITY_RETURNED
        steps = {worker.step for pod, worker in entries.values()}
        late = [pod.name for pod, worker in entries.values() if not worker.is_held or worker.saved != worker.step]
        if len(steps) != 1 or late:
            raise Violation(f"iteration {iteration} is left after steps {steps}, {late} have not saved: {planned[0]}")
        self.common[iteration] = steps.pop()

    def _check_haste(self, iteration: int, order: Interrupt) -> None:
        if order.cause is Cause.CAPACITY_RETURNED:
            raise Violation(f"iteration {iteration} is interrupted between its steps in order to grow: {order}")
        world, schedule = self.world, self.world.schedule
        can_wait = schedule.can_halt and schedule.settings.is_in_process and schedule.tells_steps in ("all", "epochs")
        began_s = world.training.began_s.get(iteration)
        # Who has no contact when all have entered makes a step that nobody knows of.
        is_early = iteration not in self.ran or began_s is None or world.now_s < began_s + 3 * schedule.step_s + 1.0
        is_calm = not is_early and began_s is not None and world.disturbed_s < began_s
        # Who hangs since before that does not come to a step.
        is_calm = is_calm and not any(worker.is_hung for _pod, worker in world.entries.get(iteration, {}).values())
        if can_wait and is_calm and schedule.tells_steps == "all" and "timeouts.drain" not in order.detail:
            raise Violation(f"iteration {iteration} is interrupted between its steps without need: {order}")
        if can_wait and is_calm and schedule.tells_steps == "all" and world.now_s < world.schedule.work_s:
            raise Violation(f"iteration {iteration} found no common step: {order}")

    def check_leave(self, pod: Pod, worker: Worker) -> None:
        """Check that nobody makes a step after the one at which all stood."""
        step = self.common.get(worker.iteration)
        # A rendezvous without memory uses a number again while who entered under it before is cut off.
        stood = any(peer is worker for _pod, peer in self.world.entries.get(worker.iteration, {}).values())
        if stood and step is not None and worker.step != step:
            raise Violation(f"{pod.name}/{worker.local_rank} has made step {worker.step}, the others left after {step}")

    def check_entry(self, pod: Pod, worker: Worker, plan: Plan) -> None:
        """Check that a worker never enters an iteration that is not newer than its last, or that is over."""
        if plan.iteration <= worker.iteration:
            raise Violation(f"{pod.name}/{worker.local_rank} enters {plan.iteration} after {worker.iteration}")
        # Nobody can stop a pod that is cut off; what counts is that it leaves as soon as it is back.
        newer = [
            (other.name, peer.local_rank)
            for other, peer in self.world.entries.get(plan.iteration + 1, {}).values()
            # A rendezvous without memory uses numbers again of which nobody lives to tell.
            if self.world.schedule.has_memory or (other.is_alive and peer.iteration > plan.iteration)
        ]
        if newer and pod.is_welcome and not self._is_stillborn(pod, plan):
            raise Violation(f"{pod.name}/{worker.local_rank} enters {plan.iteration}, {newer} are in the next already")

    def _is_stillborn(self, pod: Pod, plan: Plan) -> bool:
        """Whether a rank of this pod has no process, so that nobody makes a step in this iteration.

        The rendezvous does not wait for the other workers of such a pod (`Members.leaving`), unless pods may be split:
        they may enter before they hear that the iteration is over.
        """
        coordinator = self.world.coordinator
        if coordinator is None or coordinator._job.rules.may_split:
            return False
        numbers = [part.local_rank for part in plan.ranks if part.rank is not None]
        return any(pod.workers[number].phase in (WorkerPhase.GONE, WorkerPhase.STARTING) for number in numbers)

    def check_one_world(self, iteration: int) -> None:
        """Check that no other world can make a step when all ranks of this one have entered."""
        world = self.world
        if not world.schedule.has_memory:
            return
        for other in world.entries:
            if other != iteration and world.trains(other) and not self._is_left_alone(other):
                names = sorted(world.pods[uid].name for uid in self.pods_of(other))
                raise Violation(f"two worlds: iteration {iteration} begins while {names} still train in {other}")

    def _is_left_alone(self, iteration: int) -> bool:
        """Whether a world is in one pod, and no agent may have been there to end its processes: nobody else does."""
        timeouts = self.world.settings.timeouts
        pods = [self.world.pods[uid] for uid in self.pods_of(iteration)]
        may_go_on = not self.world.settings.is_in_process and len(pods) == 1
        return may_go_on and self.world.now_s < pods[0].agent_down_s + timeouts.heartbeat_s

    def pods_of(self, iteration: int) -> set[str]:
        """Return the pods whose workers have entered an iteration."""
        return {pod.uid for pod, _worker in self.world.entries.get(iteration, {}).values()}

    def check_repetition(self, event: Event) -> None:
        """Check that the same message again changes nothing."""
        coordinator = self.world.coordinator
        if coordinator is None or not isinstance(event, AgentReported):
            return
        before = coordinator.status(self.world.now_s, str)
        actions = coordinator.step(event, self.world.now_s)
        after = coordinator.status(self.world.now_s, str)
        if actions or before != after:
            raise Violation(f"the same message again had an effect: {event} -> {actions}")

    def check_end(self) -> None:
        """Check how the job ended."""
        coordinator = self.world.coordinator
        if coordinator is None:
            raise Violation("the rendezvous is down at the end")
        status = coordinator.status(self.world.now_s, str)
        entries = self.world.entries[max(self.world.entries)].values() if self.world.entries else ()
        late = [pod.name for pod, worker in entries if not worker.has_ended]
        if status.phase is JobPhase.COMPLETE:
            if late:
                raise Violation(f"the job is complete, and processes of {late} have not ended well")
            return
        if status.phase is JobPhase.FAILED:
            # Nobody knows how the processes of a pod ended that is cut off, or was lost before its agent said so.
            is_unheard = any(
                worker.has_ended and (pod.uid, worker.local_rank) not in self.heard_ends for pod, worker in entries
            )
            is_late = status.reason is Reason.FAILED_AFTER_TRAINING and (bool(late) or is_unheard)
            if not is_late and status.reason not in self.world.schedule.allowed_failures:
                raise Violation(f"failed without need: {status.reason} {status.message}")
            if not status.message:
                raise Violation("failed without a message")
            last = status.recoveries[-1] if status.recoveries else None
            # What fails a job after its training is no fault of a recovery.
            is_last = status.reason is not Reason.FAILED_AFTER_TRAINING
            if is_last and last is not None and last.number > self.judged and last.ended_at:
                raise Violation(f"the job failed, and its last fault is called recovered: {last}")
            return
        raise Violation(f"not over after {self.world.now_s:.0f} s: {status.phase} {status.reason} {status.message}")


__all__ = ["Ledger", "Reason", "Violation"]
