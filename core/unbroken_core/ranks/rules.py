"""What the ranks of a job must keep to: its spec, narrowed by what the script asks for.

world.maxRanks, MaxActiveWorldSize, Tree's root             the smallest holds
world.divisibleBy, ActiveWorldSizeDivisibleBy               all hold: the least common multiple
minReplicas, min_ranks of Tree's root                       the largest holds
topology.layers, Tree's layers                              one of the two
"""

import bisect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from unbroken_core.protocol.messages import Policy
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.ranks.tree.renumbering import divisible_active_world_size, max_active_world_size
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer, layer_violations

_ROOT = Layer(replace_from=True)
"""The job as a whole, as the spec has it."""


@dataclass(frozen=True)
class Rules:
    """The part of spec and script that the assignment of ranks depends on."""

    replicas: int
    minimum_replicas: int
    ranks_per_pod: int
    minimum_ranks_per_pod: int
    max_ranks: int | None
    divisible_by: int
    layers: tuple[Layer, ...]
    root: Layer = _ROOT
    """What holds for the job as a whole, beside its size."""
    fills_gaps: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    """Steps of the script's filter of the world's size, as in `Policy`."""
    has_code: bool = False
    """Whether a worker is asked who is which rank: pods may be cut then."""

    @classmethod
    def of(cls, settings: JobSettings, policy: Policy | None = None) -> "Rules":
        """Return the rules of a job. Raises InputError that says where spec and script contradict each other."""
        for message in _contradictions(settings, policy or Policy()):
            raise InputError(message)
        asked = policy or Policy()
        root = asked.layers[0] if asked.layers else _ROOT
        limits = [limit for limit in (settings.max_ranks, asked.max_ranks, root.max_ranks) if limit is not None]
        inner = tuple(replace(layer, name=f"layers[{depth}]") for depth, layer in enumerate(asked.layers) if depth)
        rules = cls(
            replicas=settings.replicas,
            minimum_replicas=settings.minimum_replicas,
            ranks_per_pod=settings.ranks_per_pod,
            minimum_ranks_per_pod=settings.minimum_ranks_per_pod,
            max_ranks=min(limits, default=None),
            divisible_by=math.lcm(settings.divisible_by, asked.divisible_by),
            layers=inner or settings.layers,
            root=root,
            fills_gaps=asked.fills_gaps,
            sizes=asked.sizes,
            has_code=bool(asked.code),
        )
        for message in rules._violations():
            raise InputError(message)
        return rules

    @property
    def may_split(self) -> bool:
        """Whether a pod may stay in the world without all of its workers."""
        return self.minimum_ranks_per_pod < self.ranks_per_pod

    @property
    def least_pods(self) -> int:
        """Fewest pods of which a world can be made: `minReplicas`, or more where a divisor or a minimum wants more."""
        return min(max(self.minimum_replicas, -(-self.least_ranks // self.ranks_per_pod)), self.replicas)

    @property
    def least_ranks(self) -> int:
        """Fewest ranks that a divisor or a minimum of the whole allows."""
        return max(self.divisible_by, self.root.min_ranks)

    @property
    def full_ranks(self) -> int:
        """Workers of all pods that the job wants to be active."""
        return self.replicas * self.ranks_per_pod

    @property
    def wanted_ranks(self) -> int:
        """Active ranks of a job in full health."""
        return self.world_size(self.full_ranks)

    def world_size(self, num_ranks: int) -> int:
        """Return how many of so many healthy ranks may be active; computed from the healthy count each time."""
        size = max_active_world_size(num_ranks, self.full_ranks, self.max_ranks)
        return self._filtered(divisible_active_world_size(num_ranks, size, self.divisible_by))

    def _filtered(self, size: int) -> int:
        """Return what the script's filter makes of a size: of a smaller one, where the divisor does not hold then."""
        while self.sizes and size:
            step = bisect.bisect_right(self.sizes, size, key=lambda step: step[0]) - 1
            wanted = self.sizes[step][1] if step >= 0 else 0
            size = wanted - wanted % self.divisible_by
            if size == wanted:
                break
        return size

    def tree_layers(self) -> list[Layer]:
        """Return the layers of the job's tree: the job, those of spec or script, the pod."""
        root = self.root
        minimum = max(self.minimum_replicas * self.minimum_ranks_per_pod, root.min_ranks)
        maximum = self.full_ranks if root.max_ranks is None else min(self.full_ranks, root.max_ranks)
        # A chain of layers that allow something begins at the pod.
        closes_gaps = self.layers[-1].close_gaps if self.layers else root.close_gaps
        return [
            replace(root, name="job", min_ranks=minimum, max_ranks=maximum),
            *self.layers,
            Layer("pod", min_ranks=self.minimum_ranks_per_pod, close_gaps=closes_gaps),
        ]

    def _violations(self) -> Iterator[str]:
        if self.max_ranks is not None and self.max_ranks < self.divisible_by:
            yield (
                f"want room for a multiple of {self.divisible_by} active ranks (world.divisibleBy and "
                f"ActiveWorldSizeDivisibleBy), got at most {self.max_ranks} (world.maxRanks and MaxActiveWorldSize)"
            )
        if self.divisible_by > self.full_ranks:
            yield (
                f"want a multiple of {self.divisible_by} active ranks (world.divisibleBy and "
                f"ActiveWorldSizeDivisibleBy), got replicas x ranksPerPod = {self.full_ranks}"
            )
        if self.wanted_ranks == 0 and self.sizes:
            yield f"Tree: world_size_filter: want active ranks of {self.full_ranks} (replicas x ranksPerPod), got none"
        yield from layer_violations(self.tree_layers())


def _contradictions(settings: JobSettings, asked: Policy) -> Iterator[str]:
    """Yield what a script may not ask for in this job."""
    if asked.divisible_by < 1 or (asked.max_ranks is not None and asked.max_ranks < 1):
        yield f"want at least 1 active rank, got MaxActiveWorldSize({asked.max_ranks}) and {asked.divisible_by}"
    if any(not 0 <= size <= start for start, size in asked.sizes):
        yield f"Tree: world_size_filter: want 0 to n active ranks of n, got {asked.sizes[:5]}"
    if any(before[0] >= after[0] for before, after in itertools.pairwise(asked.sizes)):
        yield f"Tree: world_size_filter: want ascending steps, got {asked.sizes[:5]}, ..."
    if asked.layers and settings.layers:
        names = ", ".join(layer.name for layer in settings.layers)
        yield f"want the layers in one place, got topology.layers ({names}) in the job's spec and Tree in the script"
    full = settings.replicas * settings.ranks_per_pod
    least = asked.layers[0].min_ranks if asked.layers else 0
    if least > full:
        yield f"Tree: layers[0].min_ranks: want at most replicas x ranksPerPod ({full}), got {least}"
    is_whole = settings.minimum_ranks_per_pod == settings.ranks_per_pod
    for depth, layer in enumerate(asked.layers):
        if is_whole and layer.max_ranks is not None and layer.max_ranks < settings.ranks_per_pod:
            yield (
                f"Tree: layers[{depth}].max_ranks: want at least ranksPerPod ({settings.ranks_per_pod}), because pods "
                f"are kept whole unless world.minRanksPerPod allows otherwise, got {layer.max_ranks}"
            )
