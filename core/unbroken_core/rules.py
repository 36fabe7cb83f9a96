"""What the ranks of a job must keep to."""

from dataclasses import dataclass

from unbroken_core.rank_tree import TreeLayer
from unbroken_core.renumber import divisible_active_world_size, max_active_world_size
from unbroken_core.settings import JobSettings, Layer


@dataclass(frozen=True)
class Rules:
    """The part of the settings that the assignment of ranks depends on."""

    replicas: int
    minimum_replicas: int
    ranks_per_pod: int
    minimum_ranks_per_pod: int
    max_ranks: int | None
    divisible_by: int
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, settings: JobSettings) -> "Rules":
        """Return the rules of a job."""
        return cls(
            settings.replicas,
            settings.minimum_replicas,
            settings.ranks_per_pod,
            settings.minimum_ranks_per_pod,
            settings.max_ranks,
            settings.divisible_by,
            settings.layers,
        )

    @property
    def may_split(self) -> bool:
        """Whether a pod may stay in the world without all of its workers."""
        return self.minimum_ranks_per_pod < self.ranks_per_pod

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
        return divisible_active_world_size(num_ranks, size, self.divisible_by)

    def tree_layers(self) -> list[TreeLayer]:
        """Return the layers of the job's tree: the job, those of the settings, the pod."""
        unit = 1 if self.may_split else self.ranks_per_pod
        minimum = self.minimum_replicas * self.minimum_ranks_per_pod
        # A chain of layers that allow something begins at the pod; the job itself is not in the settings.
        closes_gaps = bool(self.layers) and self.layers[-1].close_gaps
        return [
            TreeLayer("job", minimum, self.full_ranks, replace_from=True, unit=unit),
            *(
                TreeLayer(layer.name, layer.min_ranks, layer.max_ranks, layer.replace_from, layer.close_gaps, unit)
                for layer in self.layers
            ),
            TreeLayer("pod", self.minimum_ranks_per_pod, None, True, closes_gaps, unit),
        ]
