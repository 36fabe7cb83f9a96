"""What a job wants, as its rendezvous and agents need it: the small part of the spec that decisions depend on.

The operator derives it from the ResilientTrainingJob, `unbroken run` from its options; it travels as JSON in the
environment variable UNBROKEN_SETTINGS. All durations are seconds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from unbroken_core.errors import InputError
from unbroken_core.layers import Layer
from unbroken_core.reasons import Cause, Rung

MAX_RANKS_PER_POD = 64
MAX_PODS = 65_536
DEFAULT_ISOLATION_S = 120.0
"""A rendezvous whose node died is back in some 75 s (40 to 50 until the node is NotReady, then a new pod): its agents,
which leave after 85 s of silence, do not interrupt the training for that. And a rack that died is replaced in 2 min."""


@dataclass(frozen=True)
class RungBudget:
    """How often one rung may be used: `limit` times in any `window_s`; limit None means without limit."""

    rung: Rung
    limit: int | None = None
    window_s: float = 3600.0


@dataclass(frozen=True)
class Timeouts:
    """Time boxes in seconds; soft < hard < barrier."""

    soft_s: float = 60.0
    hard_s: float = 90.0
    heartbeat_s: float = 30.0
    barrier_s: float = 120.0
    completion_s: float = 120.0
    termination_grace_s: float = 5.0
    startup_s: float = 600.0
    reconnect_s: float = 5.0
    """A broken connection that does not come back in this time is a lost pod (while the job runs)."""
    last_call_s: float = 5.0
    """Forming with at least `replicas` pods ready waits so long for the others."""
    drain_s: float = 30.0
    """A planned move waits so long for a step that all ranks have finished; 0: it interrupts at once."""
    isolation_s: float | None = None
    """So long after its last word a pod that may have peers has left its iteration by itself; None: the default."""

    @property
    def isolation_limit_s(self) -> float:
        """The isolation time: long enough for a rendezvous to be started on another node meanwhile."""
        if self.isolation_s is not None:
            return self.isolation_s
        return max(DEFAULT_ISOLATION_S, 2 * (self.heartbeat_s + self.termination_grace_s))


DEFAULT_RUNGS: tuple[RungBudget, ...] = tuple(RungBudget(rung) for rung in Rung)


@dataclass(frozen=True)
class JobSettings:
    """Validated at construction: raises InputError that names the field."""

    job: str
    namespace: str = "default"
    uid: str = ""
    replicas: int = 1
    min_replicas: int | None = None
    """None means `replicas`: the job never runs with fewer pods."""
    spares: int = 0
    ranks_per_pod: int = 1
    layers: tuple[Layer, ...] = ()
    """Outermost first; the pod itself is always the innermost domain."""
    divisible_by: int = 1
    """The active world size is a multiple of this."""
    max_ranks: int | None = None
    min_ranks_per_pod: int | None = None
    """A pod with fewer healthy workers steps aside whole. None means `ranks_per_pod`: pods are never split."""
    rungs: tuple[RungBudget, ...] = DEFAULT_RUNGS
    """Enabled rungs in ladder order. With `in-process` the script must use unbroken.inprocess.Wrapper; without it
    every fault restarts the processes, and any script written for torchrun runs unchanged."""
    max_faults_per_rank: int | None = None
    no_progress_limit: int | None = 10
    """So many faults of the script in a row, without progress between them, are recovered; one more fails the job."""
    fatal_exit_codes: tuple[int, ...] = ()
    """Exit codes of a worker's process that end the job at once."""
    uncounted_causes: tuple[Cause, ...] = ()
    """Recoveries from these count in no budget of `rungs`, and are not held up by one that is used up."""
    grow_back_s: float | None = None
    """A job that shrank takes in what is ready after so long, between two steps; None: with the next recovery."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        for message in violations(self):
            raise InputError(message)

    @property
    def minimum_replicas(self) -> int:
        """Fewest pods to run with."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def minimum_ranks_per_pod(self) -> int:
        """Fewest healthy workers with which a pod stays in the world."""
        return self.ranks_per_pod if self.min_ranks_per_pod is None else self.min_ranks_per_pod

    def counts(self, cause: Cause) -> bool:
        """Return whether a recovery from this cause counts in the budgets of `rungs`."""
        return cause is not Cause.CAPACITY_RETURNED and cause not in self.uncounted_causes

    @property
    def is_in_process(self) -> bool:
        """Whether workers are restarted without a new process."""
        return any(budget.rung is Rung.IN_PROCESS for budget in self.rungs)


def violations(settings: JobSettings) -> list[str]:
    """Return one message for each broken rule, in a fixed order; empty when the settings are sound."""
    names = [layer.name for layer in settings.layers]
    is_distinct = len(set(names)) == len(names)
    return [
        *_size_violations(settings),
        *([] if all(names) else [f"topology.layers: want a name for each layer, got {names}"]),
        *([] if is_distinct else [f"topology.layers: want distinct names, got {names}"]),
        *(message for layer in settings.layers for message in _layer_violations(settings, layer)),
        *_restart_violations(settings),
        *_timeout_violations(settings.timeouts),
    ]


def _broken(checks: Iterable[tuple[bool, str]]) -> Iterator[str]:
    return (message for is_sound, message in checks if not is_sound)


def _size_violations(settings: JobSettings) -> Iterator[str]:
    """Yield what is wrong with the numbers of pods and workers."""
    replicas, minimum, spares = settings.replicas, settings.minimum_replicas, settings.spares
    per_pod, least_per_pod = settings.ranks_per_pod, settings.minimum_ranks_per_pod
    divisor, limit, world = settings.divisible_by, settings.max_ranks, replicas * per_pod
    return _broken(
        (
            (bool(settings.job), "job: want a name, got an empty string"),
            (1 <= replicas <= MAX_PODS, f"replicas: want 1 to {MAX_PODS}, got {replicas}"),
            (
                1 <= minimum <= max(replicas, 1),
                f"minReplicas: want 1 to replicas ({replicas}), got {minimum}",
            ),
            (0 <= spares <= MAX_PODS, f"spares.count: want 0 to {MAX_PODS}, got {spares}"),
            (
                1 <= per_pod <= MAX_RANKS_PER_POD,
                f"ranksPerPod: want 1 to {MAX_RANKS_PER_POD}, got {per_pod}",
            ),
            (
                1 <= least_per_pod <= per_pod,
                f"world.minRanksPerPod: want 1 to ranksPerPod ({per_pod}), got {least_per_pod}",
            ),
            (
                1 <= divisor <= max(world, 1),
                f"world.divisibleBy: want 1 to replicas x ranksPerPod ({world}), got {divisor}",
            ),
            (
                limit is None or limit >= divisor,
                f"world.maxRanks: want at least world.divisibleBy ({divisor}), got {limit}",
            ),
        )
    )


def _restart_violations(settings: JobSettings) -> Iterator[str]:
    """Yield what is wrong with the ladder."""
    rungs, limit = settings.rungs, settings.no_progress_limit
    names = [budget.rung.value for budget in rungs]
    yield from _broken(
        (
            (bool(rungs), "restart.rungs: want at least one rung, got an empty list"),
            (len(set(names)) == len(names), f"restart.rungs: want each rung at most once, got {names}"),
            (limit is None or limit >= 1, f"restart.noProgressLimit: want at least 1, got {limit}"),
            (
                settings.grow_back_s is None or settings.grow_back_s > 0,
                f"restart.growBackSeconds: want more than 0 seconds, got {settings.grow_back_s}",
            ),
            (
                settings.grow_back_s is None or {Rung.IN_PROCESS, Rung.POD} <= {budget.rung for budget in rungs},
                f"restart.growBackSeconds: want in-process and pod among restart.rungs, got {names}",
            ),
            (
                settings.grow_back_s is None or settings.timeouts.drain_s > 0,
                "restart.growBackSeconds: want timeouts.drainSeconds above 0, for a step that all ranks have finished; "
                f"got {settings.timeouts.drain_s}",
            ),
        )
    )
    for code in settings.fatal_exit_codes:
        yield from _broken(((1 <= code <= 255, f"restart.fatalExitCodes: want codes of 1 to 255, got {code}"),))
    for budget in rungs:
        where = f"restart.rungs[{budget.rung}]"
        yield from _broken(
            (
                (
                    budget.limit is None or budget.limit >= 0,
                    f"{where}.limit: want at least 0, got {budget.limit}",
                ),
                (budget.window_s > 0, f"{where}.windowSeconds: want more than 0, got {budget.window_s}"),
            )
        )


def _timeout_violations(timeouts: Timeouts) -> Iterator[str]:
    """Yield what is wrong with the time boxes."""
    soft_s, hard_s, barrier_s = timeouts.soft_s, timeouts.hard_s, timeouts.barrier_s
    least_s = timeouts.heartbeat_s + timeouts.termination_grace_s
    positive = (
        ("soft", soft_s),
        ("heartbeat", timeouts.heartbeat_s),
        ("completion", timeouts.completion_s),
        ("startup", timeouts.startup_s),
        ("reconnect", timeouts.reconnect_s),
    )
    return _broken(
        (
            *(
                (value > 0, f"timeouts.{name}Seconds: want more than 0 seconds, got {value}")
                for name, value in positive
            ),
            (timeouts.drain_s >= 0, f"timeouts.drainSeconds: want at least 0 seconds, got {timeouts.drain_s}"),
            (soft_s < hard_s, f"timeouts.softSeconds: want less than timeouts.hardSeconds ({hard_s}), got {soft_s}"),
            (
                hard_s < barrier_s,
                f"timeouts.hardSeconds: want less than timeouts.barrierSeconds ({barrier_s}), got {hard_s}",
            ),
            (
                timeouts.isolation_limit_s > least_s,
                "timeouts.isolationSeconds: want more than timeouts.heartbeatSeconds + "
                f"timeouts.terminationGraceSeconds ({least_s:g}), the time to notice and to end, got "
                f"{timeouts.isolation_limit_s:g}",
            ),
        )
    )


def _layer_violations(settings: JobSettings, layer: Layer) -> Iterator[str]:
    """Yield what makes a layer impossible, or no domain of it large enough for a single pod."""
    where = f"topology.layers[{layer.name}]"
    all_ranks = (settings.replicas + settings.spares) * settings.ranks_per_pod
    if layer.min_ranks < 1:
        yield f"{where}.minRanks: want at least 1, got {layer.min_ranks}"
    elif layer.min_ranks > all_ranks:
        yield (
            f"{where}.minRanks: want at most (replicas + spares.count) x ranksPerPod ({all_ranks}), since no domain "
            f"can have more, got {layer.min_ranks}"
        )
    if layer.max_ranks is None:
        return
    if layer.max_ranks < layer.min_ranks:
        yield f"{where}.maxRanks: want at least minRanks ({layer.min_ranks}), got {layer.max_ranks}"
    is_whole = settings.minimum_ranks_per_pod == settings.ranks_per_pod
    if is_whole and layer.max_ranks < settings.ranks_per_pod:
        yield (
            f"{where}.maxRanks: want at least ranksPerPod ({settings.ranks_per_pod}), because pods are kept whole "
            f"unless world.minRanksPerPod allows otherwise, got {layer.max_ranks}"
        )
