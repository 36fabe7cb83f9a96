"""What is simulated: a job, its cluster, what breaks, and what that costs."""

from dataclasses import dataclass
from enum import Enum

from unbroken_cli.sizing.spreads import Distribution
from unbroken_core.ranks.rules import Rules
from unbroken_core.vocabulary.reasons import Rung


class Scope(str, Enum):
    """What one fault hits. In this order a checkpoint survives more and more."""

    PROCESS = "process"
    GPU = "gpu"
    NODE = "node"
    DOMAIN = "domain"
    SWITCH = "switch"
    """All nodes of a rack."""
    SOFTWARE = "software"
    """The script itself: every process of the job."""

    __str__ = str.__str__


SURVIVES = ("process", "node", "domain", "rack", "job")
"""What a checkpoint outlives, from least to most."""
RUNGS = tuple(Rung)
LOSING = frozenset({Rung.POD, Rung.WORLD, Rung.JOB})
"""Rungs after which the nodes that were hit are out, where the fault's class has a repair."""


@dataclass(frozen=True)
class FaultClass:
    """One kind of fault, of all nodes together."""

    name: str
    scope: Scope
    rate: float
    """Faults per 1,000 node-days, of all nodes on average."""
    rungs: tuple[tuple[Rung, float], ...]
    """Probabilities of the rungs that repair it, in the ladder's order."""
    detect: Distribution
    repair: Distribution | None = None
    """How long a node that was hit is out; None: it stays."""
    shape: float = 1.0
    """Of the Weibull distribution of the time between two faults of one unit; 1 is exponential."""
    share: float = 1.0
    """Of the nodes below a domain or rack, the share that a common cause strikes."""
    destroys: int | None = None
    """Index in SURVIVES of what a checkpoint must survive; None: as the scope and the rung say."""
    kept: float = 1.0
    """Share of the faults that happen; the others are left out, to compare runs fault by fault."""

    @property
    def takes_nodes(self) -> bool:
        """Whether it puts nodes out of service."""
        return self.repair is not None and any(rung in LOSING for rung, _share in self.rungs)


@dataclass(frozen=True)
class Tier:
    """One kind of checkpoint."""

    name: str
    every_s: float
    """Seconds of training from one to the next."""
    blocking_s: float
    """For which training stands still."""
    restore_s: float
    survives: int
    """Index in SURVIVES."""


@dataclass(frozen=True)
class Lemons:
    """Nodes that break more often than others. The rates of all classes are means over all nodes."""

    share: float = 0.0
    factor: float = 1.0
    removed_after: int | None = None
    """Faults of one lemon after which a sound node stands in its place; None: never."""


@dataclass(frozen=True)
class Refill:
    """Free nodes outside of the job that replace lost ones before these are repaired."""

    nodes: int
    after: Distribution


@dataclass(frozen=True)
class Scenario:
    """All of it."""

    name: str
    num_nodes: int
    """That the job wants to be active."""
    gpus_per_node: int
    nodes_per_domain: int
    num_racks: int
    duration_s: float
    min_nodes: int
    divisible_by: int
    spares_per_domain: int
    shared_spares: int
    refill: Refill | None
    grow_back_s: float | None
    """As `restart.growBackSeconds`: None waits for the next interruption."""
    stays_within: str | None
    """Spares are promoted within this layer only (domain or rack); None: anywhere."""
    faults: tuple[FaultClass, ...]
    tiers: tuple[Tier, ...]
    restart: tuple[tuple[Rung, Distribution], ...]
    lemons: Lemons = Lemons()

    @property
    def num_gpus(self) -> int:
        """GPUs that the job wants to be active."""
        return self.num_nodes * self.gpus_per_node

    @property
    def num_domains(self) -> int:
        """Domains."""
        return -(-self.num_nodes // self.nodes_per_domain)

    @property
    def num_spares(self) -> int:
        """Spare nodes."""
        return self.spares_per_domain * self.num_domains + self.shared_spares

    @property
    def total_nodes(self) -> int:
        """Active and spare nodes."""
        return self.num_nodes + self.num_spares

    @property
    def rules(self) -> Rules:
        """What the product's coordinator makes of such a job."""
        return Rules(
            replicas=self.num_nodes,
            minimum_replicas=self.min_nodes,
            ranks_per_pod=self.gpus_per_node,
            minimum_ranks_per_pod=self.gpus_per_node,
            max_ranks=None,
            divisible_by=self.divisible_by,
            layers=(),
        )

    def domains(self) -> list[int]:
        """Return the domain of each node: full domains, their own spares, then shared spares one by one in each."""
        own = [node // self.nodes_per_domain for node in range(self.num_nodes)]
        spare = [domain for domain in range(self.num_domains) for _ in range(self.spares_per_domain)]
        return own + spare + [number % self.num_domains for number in range(self.shared_spares)]

    def rack_of(self, domain: int) -> int:
        """Return the rack of a domain."""
        return domain * self.num_racks // self.num_domains

    def rate_per_s(self, fault: FaultClass) -> float:
        """Return how many faults of a class the job can expect in a second."""
        nodes = self.num_nodes if fault.scope is Scope.SOFTWARE else self.total_nodes
        return fault.rate * nodes / (1000 * 86400)

    @property
    def expected_faults(self) -> float:
        """Return how many faults the job can expect."""
        return sum(self.rate_per_s(fault) for fault in self.faults) * self.duration_s

    @property
    def expected_stops(self) -> float:
        """Return how many checkpoints a run makes of all kinds but the most frequent: each is simulated by itself."""
        slower = sorted(tier.every_s for tier in self.tiers)[1:]
        return sum(self.duration_s / every_s for every_s in slower)

    @property
    def interruptions_per_s(self) -> float:
        """Return how often a job without shortage is interrupted: faults that hit active nodes."""
        return sum(fault.rate * fault.kept for fault in self.faults) * self.num_nodes / (1000 * 86400)

    @property
    def mtbf_s(self) -> float:
        """Return the mean time between interruptions; inf without faults."""
        return 1 / self.interruptions_per_s if self.faults else float("inf")

    def severity(self, fault: FaultClass, rung: Rung) -> int:
        """Return the index in SURVIVES of what a checkpoint must survive."""
        if fault.destroys is not None:
            return fault.destroys
        if rung in (Rung.IN_PROCESS, Rung.PROCESS) or fault.repair is None or fault.scope is Scope.SOFTWARE:
            return SURVIVES.index("process")
        words = {Scope.DOMAIN: "domain", Scope.SWITCH: "rack"}
        return SURVIVES.index(words.get(fault.scope, "node"))
