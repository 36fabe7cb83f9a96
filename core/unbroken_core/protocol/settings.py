"""What a job wants, as its rendezvous and agents need it: the small part of the spec that decisions depend on.

The operator derives it from the ResilientTrainingJob, `unbroken run` from its options; it travels as JSON in the
environment variable UNBROKEN_SETTINGS. All durations are seconds.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from unbroken_core.protocol.log_rules.rules import LogRule
from unbroken_core.vocabulary.checkpoints import MAX_COPIES
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, Rung, Word

MAX_RANKS_PER_POD = 64
MAX_PODS = 65_536
MAX_WINDOW_S = 3600
"""Of a window in which workers measure how busy they are."""
LEAST_PREFLIGHT_S, MOST_PREFLIGHT_S, USUAL_PREFLIGHT_S = 10, 300, 120
"""How long a pod may test itself before its first process. The most is less than the usual startup timeout."""
DEFAULT_ISOLATION_S = 120.0
"""A rendezvous whose node died is back in some 75 s (40 to 50 until the node is NotReady, then a new pod): its agents,
which leave after 85 s of silence, do not interrupt the training for that. And a rack that died is replaced in 2 min."""


class HealthMode(Word):
    """What becomes of findings on devices, links and nodes."""

    OFF = "Off"
    """Nothing is looked at."""
    OBSERVE = "Observe"
    """They are told, and change nothing."""
    ACT = "Act"
    """Ranks move away from what is broken."""


class StragglerMode(Word):
    """What becomes of ranks that hold all others up."""

    OFF = "Off"
    """No worker measures."""
    REPORT = "Report"
    """They are told, and change nothing."""
    MOVE = "Move"
    """They move to a ready spare."""


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


HOST = "host"
"""A layer that every job has: the nodes of its pods."""

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
    health: HealthMode = HealthMode.OBSERVE
    stragglers: StragglerMode = StragglerMode.REPORT
    straggler_window_s: float = 60.0
    """As in window_s, which is no shorter than heartbeats allow."""
    pipeline_stages: int = 1
    """Ranks are compared with those of their stage; each has as many neighbouring ranks."""
    preflight: HealthMode = HealthMode.OFF
    """What becomes of what pods find of themselves before their first process; OFF: they do not test themselves."""
    preflight_s: float = float(USUAL_PREFLIGHT_S)
    """How long that may take; as long again the tests of pairs before the first plan."""
    preflight_pairs: bool = False
    """Whether pods without ranks test with each other as well."""
    log_rules: tuple[LogRule, ...] = ()
    """What the lines that workers print say of the job."""
    copies: int = 0
    """On so many other pods each pod's checkpoints in memory are copied; 0: on none."""
    across: str = ""
    """Name of the layer of which they shall be in different domains, or HOST; "": the outermost one that there is."""

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

    @property
    def window_s(self) -> float:
        """How long a worker measures before it tells how busy it was: a pod tells its last window in a heartbeat."""
        return max(self.straggler_window_s, self.timeouts.heartbeat_s / 2)

    def counts(self, cause: Cause) -> bool:
        """Return whether a recovery from this cause counts in the budgets of `rungs`."""
        return cause is not Cause.CAPACITY_RETURNED and cause not in self.uncounted_causes

    @property
    def is_in_process(self) -> bool:
        """Whether workers are restarted without a new process."""
        return any(budget.rung is Rung.IN_PROCESS for budget in self.rungs)


def violations(settings: JobSettings) -> list[str]:
    """Return one message for each broken rule, in a fixed order; empty when the settings are sound."""
    layers = [LayerOfJob(settings, layer) for layer in settings.layers]
    return [
        *_broken(SIZE_RULES, settings),
        *_broken(LAYERS_RULES, settings),
        *(
            message
            for layer in layers
            for message in _broken(LAYER_RULES, layer, f"topology.layers[{layer.own.name}].")
        ),
        *_broken(RESTART_RULES, settings),
        *_broken(COPIES_RULES, settings),
        *_broken(STRAGGLER_RULES, settings),
        *_broken(PREFLIGHT_RULES, settings),
        *_number_violations(settings),
        *_broken(TIMEOUT_RULES, settings.timeouts, "timeouts."),
        *_log_rule_violations(settings),
    ]


class LayerOfJob:
    """A layer, and the job that it belongs to."""

    def __init__(self, job: JobSettings, own: Layer) -> None:
        self.job = job
        self.own = own

    @property
    def all_ranks(self) -> int:
        """Workers of all pods, spares included."""
        return (self.job.replicas + self.job.spares) * self.job.ranks_per_pod

    @property
    def is_whole(self) -> bool:
        """Whether pods are never split."""
        return self.job.minimum_ranks_per_pod == self.job.ranks_per_pod


Subject = TypeVar("Subject")


class Rule(Generic[Subject]):
    """One rule, in the words of the API server where its schema cannot say it otherwise, and in ours."""

    # No dataclass: to make one costs most of what this module costs, and every worker imports it when it starts.
    def __init__(
        self,
        field: str,
        is_kept: Callable[[Subject], bool],
        wanted: Callable[[Subject], str],
        cel: str = "",
        cel_message: str = "",
    ) -> None:
        """`wanted` returns what was wanted, and what was seen instead.

        `field` is the field to blame, as the spec has it. `cel` is the same rule for the API server, which has checked
        types and bounds of each field before; "" where that is enough.
        """
        self.field, self.is_kept, self.wanted = field, is_kept, wanted
        self.cel, self.cel_message = cel, cel_message


SIZE_RULES: tuple[Rule[JobSettings], ...] = (
    Rule("job", lambda job: bool(job.job), lambda job: "want a name, got an empty string"),
    Rule(
        "replicas",
        lambda job: 1 <= job.replicas <= MAX_PODS,
        lambda job: f"want 1 to {MAX_PODS}, got {job.replicas}",
    ),
    Rule(
        "minReplicas",
        lambda job: 1 <= job.minimum_replicas <= max(job.replicas, 1),
        lambda job: f"want 1 to replicas ({job.replicas}), got {job.minimum_replicas}",
        "!has(self.minReplicas) || self.minReplicas <= self.replicas",
        "minReplicas must be at most replicas",
    ),
    Rule(
        "spares.count",
        lambda job: 0 <= job.spares <= MAX_PODS,
        lambda job: f"want 0 to {MAX_PODS}, got {job.spares}",
    ),
    Rule(
        "ranksPerPod",
        lambda job: 1 <= job.ranks_per_pod <= MAX_RANKS_PER_POD,
        lambda job: f"want 1 to {MAX_RANKS_PER_POD}, got {job.ranks_per_pod}",
    ),
    Rule(
        "world.minRanksPerPod",
        lambda job: 1 <= job.minimum_ranks_per_pod <= job.ranks_per_pod,
        lambda job: f"want 1 to ranksPerPod ({job.ranks_per_pod}), got {job.minimum_ranks_per_pod}",
        "!has(self.world) || !has(self.world.minRanksPerPod) || self.world.minRanksPerPod <= self.ranksPerPod",
        "world.minRanksPerPod must be at most ranksPerPod",
    ),
    Rule(
        "world.divisibleBy",
        lambda job: 1 <= job.divisible_by <= max(job.replicas * job.ranks_per_pod, 1),
        lambda job: f"want 1 to replicas x ranksPerPod ({job.replicas * job.ranks_per_pod}), got {job.divisible_by}",
        "!has(self.world) || self.world.divisibleBy <= self.replicas * self.ranksPerPod",
        "world.divisibleBy must be at most replicas x ranksPerPod",
    ),
    Rule(
        "world.maxRanks",
        lambda job: job.max_ranks is None or job.max_ranks >= job.divisible_by,
        lambda job: f"want at least world.divisibleBy ({job.divisible_by}), got {job.max_ranks}",
        "!has(self.world) || !has(self.world.maxRanks) || self.world.maxRanks >= self.world.divisibleBy",
        "world.maxRanks must be at least world.divisibleBy",
    ),
)
LAYERS_RULES: tuple[Rule[JobSettings], ...] = (
    Rule(
        "topology.layers",
        lambda job: all(layer.name for layer in job.layers),
        lambda job: f"want a name for each layer, got {_names(job)}",
    ),
    Rule(
        "topology.layers",
        lambda job: len(set(_names(job))) == len(job.layers),
        lambda job: f"want distinct names, got {_names(job)}",
    ),
)
LAYER_FITS_JOB: Rule[LayerOfJob] = Rule(
    "minRanks",
    lambda layer: layer.own.min_ranks <= layer.all_ranks,
    lambda layer: (
        f"want at most (replicas + spares.count) x ranksPerPod ({layer.all_ranks}), since no domain can have more, "
        f"got {layer.own.min_ranks}"
    ),
    "!has(self.topology) || self.topology.layers.all(layer, layer.minRanks <= "
    "(self.replicas + (has(self.spares) ? self.spares.count : 0)) * self.ranksPerPod)",
    "topology.layers[].minRanks must be at most (replicas + spares.count) x ranksPerPod",
)
LAYER_LIMITS: Rule[LayerOfJob] = Rule(
    "maxRanks",
    lambda layer: layer.own.max_ranks is None or layer.own.max_ranks >= layer.own.min_ranks,
    lambda layer: f"want at least minRanks ({layer.own.min_ranks}), got {layer.own.max_ranks}",
    "!has(self.maxRanks) || self.maxRanks >= self.minRanks",
    "maxRanks must be at least minRanks",
)
LAYER_FITS_PODS: Rule[LayerOfJob] = Rule(
    "maxRanks",
    lambda layer: layer.own.max_ranks is None or not layer.is_whole or layer.own.max_ranks >= layer.job.ranks_per_pod,
    lambda layer: (
        f"want at least ranksPerPod ({layer.job.ranks_per_pod}), because pods are kept whole unless "
        f"world.minRanksPerPod allows otherwise, got {layer.own.max_ranks}"
    ),
    "!has(self.topology) || self.topology.layers.all(layer, !has(layer.maxRanks) || "
    "layer.maxRanks >= self.ranksPerPod || (has(self.world) && has(self.world.minRanksPerPod) && "
    "self.world.minRanksPerPod < self.ranksPerPod))",
    "topology.layers[].maxRanks must be at least ranksPerPod, because pods are kept whole unless "
    "world.minRanksPerPod allows otherwise",
)
LAYER_RULES: tuple[Rule[LayerOfJob], ...] = (
    Rule(
        "minRanks",
        lambda layer: layer.own.min_ranks >= 1,
        lambda layer: f"want at least 1, got {layer.own.min_ranks}",
    ),
    LAYER_FITS_JOB,
    LAYER_LIMITS,
    LAYER_FITS_PODS,
)
RESTART_RULES: tuple[Rule[JobSettings], ...] = (
    Rule("restart.rungs", lambda job: bool(job.rungs), lambda job: "want at least one rung, got an empty list"),
    Rule(
        "restart.rungs",
        lambda job: len(set(_rungs(job))) == len(job.rungs),
        lambda job: f"want each rung at most once, got {_rungs(job)}",
    ),
    Rule(
        "restart.fatalExitCodes",
        lambda job: len(set(job.fatal_exit_codes)) == len(job.fatal_exit_codes),
        lambda job: f"want each code at most once, got {list(job.fatal_exit_codes)}",
    ),
    Rule(
        "restart.uncountedCauses",
        lambda job: len(set(job.uncounted_causes)) == len(job.uncounted_causes),
        lambda job: f"want each cause at most once, got {[cause.value for cause in job.uncounted_causes]}",
    ),
    Rule(
        "restart.noProgressLimit",
        lambda job: job.no_progress_limit is None or job.no_progress_limit >= 1,
        lambda job: f"want at least 1, got {job.no_progress_limit}",
    ),
    Rule(
        "restart.growBackSeconds",
        lambda job: job.grow_back_s is None or job.grow_back_s > 0,
        lambda job: f"want more than 0 seconds, got {job.grow_back_s}",
    ),
    Rule(
        "restart.growBackSeconds",
        lambda job: job.grow_back_s is None or {Rung.IN_PROCESS, Rung.POD} <= {budget.rung for budget in job.rungs},
        lambda job: f"want in-process and pod among restart.rungs, got {_rungs(job)}",
        "!has(self.restart) || !has(self.restart.growBackSeconds) || "
        "(self.restart.rungs.exists(rung, rung.name == 'in-process') && "
        "self.restart.rungs.exists(rung, rung.name == 'pod') && "
        "(!has(self.timeouts) || self.timeouts.drainSeconds > 0))",
        "restart.growBackSeconds needs in-process and pod among restart.rungs, and timeouts.drainSeconds above 0",
    ),
    Rule(
        "restart.growBackSeconds",
        lambda job: job.grow_back_s is None or job.timeouts.drain_s > 0,
        lambda job: (
            f"want timeouts.drainSeconds above 0, for a step that all ranks have finished; got {job.timeouts.drain_s}"
        ),
    ),
)
COPIES_RULES: tuple[Rule[JobSettings], ...] = (
    Rule(
        "memory.replicas",
        lambda job: 0 <= job.copies <= MAX_COPIES,
        lambda job: f"want 0 to {MAX_COPIES}, got {job.copies}",
    ),
    Rule(
        "memory.across",
        lambda job: job.across in ("", HOST, *_names(job)),
        lambda job: f"want {HOST!r} or the name of a layer of topology.layers, {_names(job)}, got {job.across[:80]!r}",
        "!has(self.memory) || !has(self.memory.across) || self.memory.across in ['', 'host'] || "
        "(has(self.topology) && (has(self.topology.preset) || "
        "self.topology.layers.exists(layer, layer.name == self.memory.across)))",
        "memory.across must be host or the name of a layer of topology.layers",
    ),
)
STRAGGLER_RULES: tuple[Rule[JobSettings], ...] = (
    Rule(
        "health.stragglers.windowSeconds",
        lambda job: 1 <= job.straggler_window_s <= MAX_WINDOW_S,
        lambda job: f"want 1 to {MAX_WINDOW_S} seconds, got {job.straggler_window_s}",
    ),
    Rule(
        "health.stragglers.pipelineStages",
        lambda job: 1 <= job.pipeline_stages <= job.replicas * job.ranks_per_pod,
        lambda job: f"want 1 to replicas x ranksPerPod ({job.replicas * job.ranks_per_pod}), got {job.pipeline_stages}",
        "!has(self.health) || !has(self.health.stragglers) || "
        "self.health.stragglers.pipelineStages <= self.replicas * self.ranksPerPod",
        "health.stragglers.pipelineStages must be at most replicas x ranksPerPod",
    ),
)
PREFLIGHT_RULES: tuple[Rule[JobSettings], ...] = (
    Rule(
        "health.preflight.timeoutSeconds",
        lambda job: LEAST_PREFLIGHT_S <= job.preflight_s <= MOST_PREFLIGHT_S,
        lambda job: f"want {LEAST_PREFLIGHT_S} to {MOST_PREFLIGHT_S} seconds, got {job.preflight_s:g}",
    ),
    Rule(
        "health.preflight.timeoutSeconds",
        lambda job: job.preflight is HealthMode.OFF or job.preflight_s < job.timeouts.startup_s,
        lambda job: (
            f"want less than timeouts.startupSeconds ({job.timeouts.startup_s:g}), in which a pod gets ready, "
            f"got {job.preflight_s:g}"
        ),
        "!has(self.health) || !has(self.health.preflight) || self.health.preflight.mode == 'Off' || "
        "!has(self.timeouts) || self.health.preflight.timeoutSeconds < self.timeouts.startupSeconds",
        "health.preflight.timeoutSeconds must be less than timeouts.startupSeconds",
    ),
    Rule(
        "health.preflight.pairs",
        lambda job: not job.preflight_pairs or job.preflight is not HealthMode.OFF,
        lambda job: f"want health.preflight.mode Observe or Act for tests of pairs, got {job.preflight.value}",
        "!has(self.health) || !has(self.health.preflight) || !self.health.preflight.pairs || "
        "self.health.preflight.mode != 'Off'",
        "health.preflight.pairs needs health.preflight.mode Observe or Act",
    ),
)
TIMEOUT_RULES: tuple[Rule[Timeouts], ...] = (
    Rule("softSeconds", lambda limits: limits.soft_s > 0, lambda limits: _more_than_none(limits.soft_s)),
    Rule("heartbeatSeconds", lambda limits: limits.heartbeat_s > 0, lambda limits: _more_than_none(limits.heartbeat_s)),
    Rule(
        "completionSeconds", lambda limits: limits.completion_s > 0, lambda limits: _more_than_none(limits.completion_s)
    ),
    Rule("startupSeconds", lambda limits: limits.startup_s > 0, lambda limits: _more_than_none(limits.startup_s)),
    Rule("reconnectSeconds", lambda limits: limits.reconnect_s > 0, lambda limits: _more_than_none(limits.reconnect_s)),
    Rule(
        "drainSeconds",
        lambda limits: limits.drain_s >= 0,
        lambda limits: f"want at least 0 seconds, got {limits.drain_s}",
    ),
    Rule(
        "softSeconds",
        lambda limits: limits.soft_s < limits.hard_s,
        lambda limits: f"want less than timeouts.hardSeconds ({limits.hard_s}), got {limits.soft_s}",
        "self.softSeconds < self.hardSeconds",
        "softSeconds must be less than hardSeconds",
    ),
    Rule(
        "hardSeconds",
        lambda limits: limits.hard_s < limits.barrier_s,
        lambda limits: f"want less than timeouts.barrierSeconds ({limits.barrier_s}), got {limits.hard_s}",
        "self.hardSeconds < self.barrierSeconds",
        "hardSeconds must be less than barrierSeconds",
    ),
    Rule(
        "isolationSeconds",
        lambda limits: limits.isolation_limit_s > limits.heartbeat_s + limits.termination_grace_s,
        lambda limits: (
            "want more than timeouts.heartbeatSeconds + timeouts.terminationGraceSeconds "
            f"({limits.heartbeat_s + limits.termination_grace_s:g}), the time to notice and to end, got "
            f"{limits.isolation_limit_s:g}"
        ),
        "!has(self.isolationSeconds) || self.isolationSeconds > self.heartbeatSeconds + self.terminationGraceSeconds",
        "isolationSeconds must be more than heartbeatSeconds + terminationGraceSeconds",
    ),
)


def _broken(rules: Iterable[Rule[Subject]], subject: Subject, where: str = "") -> Iterator[str]:
    return (f"{where}{rule.field}: {rule.wanted(subject)}" for rule in rules if not rule.is_kept(subject))


def _number_violations(settings: JobSettings) -> Iterator[str]:
    """Yield what is wrong with the items of lists of numbers."""
    for code in settings.fatal_exit_codes:
        if not 1 <= code <= 255:
            yield f"restart.fatalExitCodes: want codes of 1 to 255, got {code}"
    for budget in settings.rungs:
        where = f"restart.rungs[{budget.rung}]"
        if budget.limit is not None and budget.limit < 0:
            yield f"{where}.limit: want at least 0, got {budget.limit}"
        if budget.window_s <= 0:
            yield f"{where}.windowSeconds: want more than 0, got {budget.window_s}"


def _log_rule_violations(settings: JobSettings) -> Iterable[str]:
    if not settings.log_rules:
        return ()
    from unbroken_core.protocol.log_rules.checking import rule_violations  # noqa: PLC0415 - no job without rules loads it

    return rule_violations(settings.log_rules)


def _names(settings: JobSettings) -> list[str]:
    return [layer.name for layer in settings.layers]


def _rungs(settings: JobSettings) -> list[str]:
    return [budget.rung.value for budget in settings.rungs]


def _more_than_none(seconds: float) -> str:
    return f"want more than 0 seconds, got {seconds}"
