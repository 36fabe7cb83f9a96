"""Random jobs and random faults, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation import watches

from unbroken_core.protocol.messages import Policy
from unbroken_core.protocol.settings import DEFAULT_RUNGS, HealthMode, JobSettings, RungBudget
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import JobPhase, Reason, Rung, WorkerPhase

if TYPE_CHECKING:
    from tests.simulation.pod import Pod, Worker
    from tests.simulation.world import World


FAILING_PODS = 4_000_000
"""From this seed on one pod of each job fails each time that it trains. Earlier ones tell what they told before."""

CUT_OFF_PODS = 50_000_000
"""From this seed on each job keeps copies, and all its pods with ranks are cut off together; they come back one by one,
but for as many as there are copies, most often to another rendezvous."""


@dataclass(frozen=True)
class FaultPlan:
    """One fault at one moment; it looks for its victim when it strikes."""

    at_s: float
    text: str
    strike: Callable[[World], None]
    is_planned: bool = False
    """Whether the job may take its time for it."""


@dataclass(frozen=True)
class Ambush:
    """A fault so soon after the coordinator entered a phase for the n-th time."""

    phase: JobPhase
    turn: int
    fault: FaultPlan
    """Its `at_s` counts from the change of phase."""


@dataclass(frozen=True)
class Schedule:
    """All that a seed decides."""

    seed: int
    settings: JobSettings
    faults: tuple[FaultPlan, ...]
    ambushes: tuple[Ambush, ...]
    num_racks: int
    work_s: float
    checkpoint_s: float
    completion_spread_s: float
    consequences: float
    """Share of peers that raise when a worker leaves; the others block."""
    is_batching: bool
    """Whether agents take several messages before they act."""
    bad_start: float
    """Share of processes that end before they are ready."""
    policy: Policy | None
    """What the script asks for."""
    is_silent: float
    """Share of questions that a worker never answers."""
    allowed_failures: tuple[Reason, ...]
    has_memory: bool
    """Whether a new rendezvous knows the numbers of the one before."""
    is_accounted: bool
    """Whether the operator vouches for the end of pods that are no more."""
    can_halt: bool
    """Whether agents know Halt."""
    memory: str
    """Where checkpoints in memory are: "none", in each "pod", there with "copies" on others, all on one "host", or in
    pods with "older agents"."""
    tells_steps: str
    """Which steps scripts tell: "all", "none", of "rank 0" alone, "skewed" (rank 0 counts otherwise), in "epochs"."""
    step_s: float
    stall_s: float
    """How long a checkpoint holds training up; 0: never."""
    has_watches: bool
    """Whether pods have a watch, which tells of devices."""
    queue_s: float
    """Longest time that a pod waits for a node; longer than any startup timeout, or 0."""
    patience_s: float
    limit_s: float


def make_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(f"schedule {seed}")
    settings = _growing(_settings(rng), random.Random(f"growth {seed}"))
    work_s = 0.0
    faults = []
    moment_s = rng.choice([2.0, 20.0, 20.0])
    for _number in range(rng.randint(0, 10)):
        # Half of the faults fall into the recovery of the one before.
        moment_s += rng.choice([0.0, 0.01, 0.1, 1.0, 8.0, 60.0]) * rng.random() + 0.001
        faults.append(_fault(rng, moment_s))
    bad_start = rng.choice([0.0, 0.0, 0.0, 0.1, 0.3])
    # The default ladder can always go on, as long as pods come back; what is bounded may run out.
    is_endless = settings.rungs == DEFAULT_RUNGS and not bad_start and settings.max_faults_per_rank is None
    allowed = () if is_endless else (Reason.BUDGET_EXHAUSTED, Reason.FAILED_BEFORE_READY, Reason.BELOW_MINIMUM)
    policy, is_silent = _policy(random.Random(f"script {seed}"), settings)
    if is_silent:
        allowed = (*allowed, Reason.POLICY_REFUSED)
    timeouts = settings.timeouts
    # Of its own, so that the other seeds tell what they told before.
    queue_s = random.Random(f"queue {seed}").choice([0.0, 0.0, 0.0, 3 * timeouts.startup_s])
    more = random.Random(f"isolation {seed}")
    has_memory = more.random() < 0.7
    is_accounted = more.random() < 0.5
    if more.random() < 0.3:
        faults.append(_isolation(more, more.uniform(10.0, 40.0)))
        if more.random() < 0.3:
            faults.append(FaultPlan(faults[-1].at_s + more.uniform(0.0, 60.0), "** crash", lambda w: _crash(w, 0, 0.5)))
        work_s = 400.0  # So that the pods that are cut off do not complete meanwhile.
    kept = random.Random(f"memory {seed}")
    memory = kept.choice(["none", "none", "pod", "pod", "host", "older agents"])
    if memory != "none" and kept.random() < 0.4:
        faults += [_spoil(kept, kept.uniform(5.0, 60.0)) for _number in range(kept.randint(1, 3))]
    copied = random.Random(f"copies {seed}")
    if memory == "pod" and copied.random() < 0.6:
        memory, settings = "copies", replace(settings, copies=copied.choice([1, 1, 1, 2]))
    planned = random.Random(f"move {seed}")
    if planned.random() < 0.5:
        faults += [_cordon(planned, planned.uniform(10.0, 45.0)) for _number in range(planned.randint(1, 3))]
    watched = random.Random(f"watches {seed}")
    has_watches = watched.random() < 0.35
    if has_watches:
        settings = _pairing(_watching(settings, watched), seed)
        faults += [_find(watched, watched.uniform(5.0, 90.0)) for _number in range(watched.randint(1, 4))]
        work_s = max(work_s, watched.choice([0.0, 400.0]))
    if seed >= FAILING_PODS:
        faults.append(_failing_pod(random.Random(f"failing {seed}")))
    schedule = Schedule(
        seed=seed,
        settings=settings,
        faults=tuple(faults),
        ambushes=tuple(_ambush(rng) for _number in range(rng.choice([0, 0, 1, 2, 4]))),
        num_racks=rng.randint(1, 3),
        work_s=max(rng.choice([5.0, 40.0]), work_s),
        checkpoint_s=5.0,
        completion_spread_s=rng.choice([0.01, 0.2, 10.0]),
        consequences=rng.choice([0.0, 0.3, 1.0]),
        is_batching=rng.random() < 0.4,
        bad_start=bad_start,
        policy=policy,
        is_silent=is_silent,
        allowed_failures=allowed,
        has_memory=has_memory,
        is_accounted=is_accounted,
        can_halt=planned.random() < 0.85,
        memory=memory,
        tells_steps=planned.choice(["all", "all", "all", "all", "none", "rank 0", "skewed", "epochs"]),
        step_s=planned.choice([0.05, 0.5, 2.0]),
        stall_s=random.Random(f"stall {seed}").choice([0.0, 0.0, 0.25, 2.0]),
        has_watches=has_watches,
        queue_s=queue_s,
        patience_s=3 * (timeouts.startup_s + timeouts.barrier_s + queue_s),
        limit_s=20_000.0,
    )
    return _cutting_off(schedule) if seed >= CUT_OFF_PODS else schedule


def _cutting_off(schedule: Schedule) -> Schedule:
    """Let a job keep copies, and all its pods with ranks be cut off together."""
    rng = random.Random(f"cut off {schedule.seed}")
    copies = rng.choice([1, 1, 2])
    # The pods that are left are one too few, so that the first to come back makes a world possible.
    spares = rng.randint(1, 2)
    layers = tuple(replace(layer, max_ranks=None) for layer in schedule.settings.layers)
    settings = replace(schedule.settings, layers=layers, max_ranks=None, copies=copies)
    settings = replace(settings, replicas=rng.randint(3, 5), min_replicas=spares + 1, spares=spares)
    faults = (*(schedule.faults if rng.random() < 0.3 else ()), *_cut_off(rng, copies))
    return replace(schedule, memory="copies", settings=settings, queue_s=0.0, faults=faults, work_s=400.0)


def _settings(rng: random.Random) -> JobSettings:
    replicas = rng.randint(1, 5)
    ranks_per_pod = rng.choice([1, 2, 2, 4])
    world = replicas * ranks_per_pod
    layers = _layers(rng, ranks_per_pod, world)
    # All pods may be in one rack, which may not take them all.
    is_limited = any(layer.max_ranks is not None for layer in layers)
    return JobSettings(
        job="digits",
        replicas=replicas,
        min_replicas=1 if is_limited else rng.choice([None, 1, max(1, replicas - 1)]),
        spares=rng.randint(0, 3),
        ranks_per_pod=ranks_per_pod,
        layers=layers,
        divisible_by=rng.choice([1, 1, 1, min(2, world)]),
        max_ranks=rng.choice([None, None, None, max(world - 1, 2)]),
        min_ranks_per_pod=rng.choice([None, None, max(1, ranks_per_pod - 1)]),
        rungs=_rungs(rng),
        max_faults_per_rank=rng.choice([None, None, None, 2]),
    )


def _growing(settings: JobSettings, rng: random.Random) -> JobSettings:
    rungs = {budget.rung for budget in settings.rungs}
    if not {Rung.IN_PROCESS, Rung.POD} <= rungs or rng.random() < 0.5:
        return settings
    return replace(settings, grow_back_s=rng.choice([0.1, 3.0, 10.0]))


def _policy(rng: random.Random, settings: JobSettings) -> tuple[Policy | None, float]:
    """Return what the script asks for, within the spec, and how often its code hangs."""
    world = settings.replicas * settings.ranks_per_pod
    kind = rng.choice(["none", "none", "numbers", "code"])
    if kind == "none" or not settings.is_in_process:
        return None, 0.0
    if kind == "numbers":
        limit = rng.choice([None, max(settings.divisible_by, world - 1)])
        return Policy(max_ranks=limit, fills_gaps=rng.random() < 0.5), 0.0
    if any(layer.max_ranks is not None for layer in settings.layers):
        return None, 0.0  # It knows nothing of domains, and would be refused.
    return Policy(code="backwards"), rng.choice([0.0, 0.0, 0.2])


def _layers(rng: random.Random, ranks_per_pod: int, world: int) -> tuple[Layer, ...]:
    """Return none, one or two layers; what limits them still lets any pod be active."""
    names = rng.choice([(), ("rack",), ("rack", "nvlink")])
    return tuple(
        Layer(
            name,
            name,
            min_ranks=rng.choice([1, 1, max(1, ranks_per_pod - 1)]),
            max_ranks=rng.choice([None, None, None, max(world - 1, ranks_per_pod, 2)]),
            replace_from=rng.random() < 0.8,
            close_gaps=rng.random() < 0.3,
        )
        for name in names
    )


def _rungs(rng: random.Random) -> tuple[RungBudget, ...]:
    if rng.random() < 0.6:
        return DEFAULT_RUNGS
    rungs = [rung for rung in Rung if rng.random() < 0.75] or [Rung.JOB]
    return tuple(RungBudget(rung, rng.choice([None, 1, 3]), rng.choice([60.0, 3600.0])) for rung in rungs)


def _ambush(rng: random.Random) -> Ambush:
    phase = rng.choice([JobPhase.PLANNED, JobPhase.PLANNED, JobPhase.INTERRUPTED, JobPhase.RUNNING])
    return Ambush(phase, rng.randint(1, 3), _fault(rng, rng.choice([0.0, 0.003, 0.006, 0.05, 1.0]) * rng.random()))


def _fault(rng: random.Random, at_s: float) -> FaultPlan:
    pick, depth = rng.random(), rng.random()
    name = rng.choice(sorted(_KINDS))
    return FaultPlan(at_s, f"** {name}", lambda world: _KINDS[name](world, pick, depth))


def _isolation(rng: random.Random, at_s: float) -> FaultPlan:
    """Cut all pods with ranks off from the rendezvous together; they reach each other, and it hears the others."""
    how, lasts_s = rng.choice(["both", "both", "up", "down"]), rng.choice([20.0, 60.0, 300.0])

    def strike(world: World) -> None:
        pods = [
            pod
            for pod in world.pods.values()
            if pod.is_alive and any(worker.rank is not None for worker in pod.workers)
        ]
        for pod in pods:
            world.guilty_pods.add(pod.uid)
            pod.cut_off(how)

        def mend() -> None:
            for pod in pods:
                pod.mend()

        world.after(lasts_s, mend, f"all are reachable again after {lasts_s:g} s")

    return FaultPlan(at_s, f"** isolation, {how}", strike)


def _cut_off(rng: random.Random, copies: int) -> list[FaultPlan]:
    """Cut all pods with ranks off, and let some of them be lost meanwhile; the others come back one by one."""
    at_s, lasts_s, num_lost = rng.uniform(10.0, 60.0), rng.choice([5.0, 150.0, 200.0, 300.0]), rng.randint(0, copies)
    later_s = [rng.choice([0.0, 0.5, 4.0]) * rng.random() for _number in range(9)]
    lost_after_s = [rng.random() * lasts_s for _number in range(num_lost)]
    is_silent = rng.random() < 0.5

    def strike(world: World) -> None:
        pods = [
            pod
            for pod in world.pods.values()
            if pod.is_alive and any(worker.rank is not None for worker in pod.workers)
        ]
        rng.shuffle(pods)
        for pod in pods:
            world.guilty_pods.add(pod.uid)
            pod.cut_off("both")
        for pod, after_s in zip(pods, lost_after_s, strict=False):
            world.after(after_s, partial(pod.die, is_silent=is_silent), f"{pod.name} is lost")
        for pod, after_s in zip(pods[num_lost:], later_s, strict=False):
            world.after(lasts_s + after_s, pod.mend, f"{pod.name} is reachable again")

    plans = [FaultPlan(at_s, "** cut off together", strike)]
    if rng.random() < 0.8:
        crash_s = at_s + lasts_s * rng.choice([rng.random(), 1.0]) + rng.choice([-1.0, 0.0, 1.0]) * rng.random()
        plans.append(FaultPlan(crash_s, "** crash", lambda world: _crash(world, 0, rng.random())))
    return plans


def _cordon(rng: random.Random, at_s: float) -> FaultPlan:
    """Let a pod with ranks be left as planned."""
    pick, lasts_s, comes_back = rng.random(), rng.choice([0.5, 5.0, 40.0, 90.0]), rng.random() < 0.5

    def strike(world: World) -> None:
        pod = _pod(world, pick, wants_active=True)
        if pod is not None:
            world.cordon(pod, lasts_s, comes_back)

    return FaultPlan(at_s, "** cordon", strike, is_planned=True)


def _watching(settings: JobSettings, rng: random.Random) -> JobSettings:
    """Let the job act on what is found, or only tell it, and let pods test themselves or not."""
    preflight = rng.choice([HealthMode.OFF, HealthMode.OFF, HealthMode.OBSERVE, HealthMode.ACT])
    health = rng.choice([HealthMode.ACT, HealthMode.ACT, HealthMode.OBSERVE])
    return replace(settings, health=health, preflight=preflight)


def _pairing(settings: JobSettings, seed: int) -> JobSettings:
    """Let pods test with each other in half of the jobs that have a preflight.

    Seeds of the second million are kept for what they have found: they stay as they were.
    """
    chance = random.Random(f"pairs {seed}")
    is_kept = 1_000_000 <= seed < 2_000_000
    wants = settings.preflight is not HealthMode.OFF and not is_kept and chance.random() < 0.5
    return replace(settings, preflight_pairs=True) if wants else settings


def _find(rng: random.Random, at_s: float) -> FaultPlan:
    """Let watches find something, true or not."""
    kind = rng.choice(["dead device", "dead device", "false alarm", "everywhere", "suspect", "links", "worn"])
    pick, lasts_s, delays = (
        rng.random(),
        rng.choice([1.0, 30.0, 200.0]),
        [rng.uniform(0.0, 5.0) for _number in range(9)],
    )

    def strike(world: World) -> None:
        pod = _pod(world, pick, wants_active=kind != "worn")
        if pod is None:
            return
        find = world.watches.find
        if kind == "dead device":
            world.watches.break_device(pod)
        elif kind == "false alarm":
            find(pod, watches.LOST, lasts_s)
        elif kind == "worn":
            find(pod, watches.WORN, lasts_s)
        elif kind == "suspect":
            find(pod, watches.HINT, lasts_s)
            if delays[0] < 2.5:
                world.after(15.0, lambda: find(pod, watches.SURE, lasts_s), "")
        else:
            pods = [one for one in world.pods.values() if kind == "everywhere" or one.domains[:1] == pod.domains[:1]]
            finding = watches.LOST if kind == "everywhere" else watches.DOWN
            for one, delay_s in zip(pods, delays, strict=False):
                world.after(delay_s, partial(find, one, finding, lasts_s), "")

    return FaultPlan(at_s, f"** finds: {kind}", strike, is_planned=True)


def _failing_pod(rng: random.Random) -> FaultPlan:
    pick, at_s = rng.random(), rng.uniform(2.0, 30.0)

    def strike(world: World) -> None:
        pod = _pod(world, pick, wants_active=True)
        if pod is not None:
            world.failing.begin(pod)

    return FaultPlan(at_s, "** a pod fails each time from now on", strike)


def _spoil(rng: random.Random, at_s: float) -> FaultPlan:
    pick = rng.random()
    return FaultPlan(at_s, "** spoil", lambda world: world.memory.spoil(pick), is_planned=True)


def _pod(world: World, pick: float, wants_active: bool = False) -> Pod | None:
    pods = [pod for pod in world.pods.values() if pod.is_alive and not pod.is_leaving]
    if wants_active:
        pods = [pod for pod in pods if any(worker.rank is not None for worker in pod.workers)] or pods
    return pods[int(pick * len(pods))] if pods else None


def _worker(world: World, pick: float, phase: WorkerPhase | None) -> tuple[Pod, Worker] | None:
    found = [
        (pod, worker)
        for pod in world.pods.values()
        if pod.is_alive
        for worker in pod.workers
        if phase is None or worker.phase is phase
    ]
    return found[int(pick * len(found))] if found else None


def _exception(world: World, pick: float, _depth: float) -> None:
    victim = _worker(world, pick, WorkerPhase.RUNNING)
    if victim is not None:
        world.note_guilt(*victim, "raises")
        victim[0].raise_exception(victim[1], "ValueError: injected")


def _kill(world: World, pick: float, _depth: float) -> None:
    victim = _worker(world, pick, None)
    if victim is not None:
        world.note_guilt(*victim, "is killed")
        victim[0].kill(victim[1])


def _kill_rank_0(world: World, _pick: float, _depth: float) -> None:
    for pod in world.pods.values():
        for worker in pod.workers:
            if worker.rank == 0 and pod.is_alive:
                world.note_guilt(pod, worker, "is killed as rank 0")
                pod.kill(worker)
                return


def _hang(world: World, pick: float, depth: float) -> None:
    victim = _worker(world, pick, WorkerPhase.RUNNING)
    if victim is not None:
        world.note_guilt(*victim, "hangs")
        victim[0].hang(victim[1], is_stubborn=depth < 0.3)


def _slow(world: World, pick: float, depth: float) -> None:
    victim = _worker(world, pick, WorkerPhase.RUNNING)
    if victim is not None:
        world.note_guilt(*victim, "will be slow to leave")
        victim[1].stop_s = depth * 45.0


def _lose_pod(world: World, pick: float, depth: float) -> None:
    pod = _pod(world, pick, wants_active=depth < 0.7)
    if pod is not None:
        world.guilty_pods.add(pod.uid)
        pod.die(is_silent=depth % 0.2 < 0.1)


def _lose_rack(world: World, pick: float, _depth: float) -> None:
    victim = _pod(world, pick)
    for pod in list(world.pods.values()):
        if victim is not None and pod.is_alive and pod.domains[:1] == victim.domains[:1] and pod.domains:
            world.guilty_pods.add(pod.uid)
            pod.die(is_silent=False)


def _leave(world: World, pick: float, _depth: float) -> None:
    pod = _pod(world, pick, wants_active=True)
    if pod is not None:
        world.guilty_pods.add(pod.uid)
        world.tell(f"{pod.name} is leaving")
        pod.leave()


def _restart_agent(world: World, pick: float, depth: float) -> None:
    pod = _pod(world, pick)
    if pod is not None:
        down_s = depth * 8.0
        # Too long an absence costs the pod its place: at any time when an interruption is under way.
        world.guilty_pods.add(pod.uid)
        world.tell(f"the agent of {pod.name} is down for {down_s:.2f} s")
        pod.restart_agent(down_s)


def _cut(world: World, pick: float, depth: float) -> None:
    pod = _pod(world, pick)
    if pod is None:
        return
    world.guilty_pods.add(pod.uid)
    world.tell(f"{pod.name} is cut off for {depth * 60:.1f} s")
    pod.cut_off("both")
    if depth < 0.5 and pod.connection is not None:
        world.break_connection(pod.connection)
    world.after(depth * 60.0, pod.mend, f"{pod.name} is reachable again")


def _crash(world: World, _pick: float, depth: float) -> None:
    world.crash_coordinator(depth * 5.0)


_KINDS: dict[str, Callable[[World, float, float], None]] = {
    "exception": _exception,
    "exception again": _exception,
    "kill": _kill,
    "kill rank 0": _kill_rank_0,
    "hang": _hang,
    "slow": _slow,
    "lose pod": _lose_pod,
    "lose rack": _lose_rack,
    "leave": _leave,
    "restart agent": _restart_agent,
    "cut off": _cut,
    "crash rendezvous": _crash,
}
