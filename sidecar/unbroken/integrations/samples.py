"""Which samples each rank trains in which step, whatever the size of the world: no sample twice, none left out.

The data are one endless row: a permutation of all samples, then another, and so on. Step k takes the k-th piece of
`global_batch` samples, and each rank an equal part of it. So the number of the step is the place in the data, in any
world, however far the workers of a loader have read ahead.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class GlobalBatches(Sampler[list[int]]):
    """The batches of this rank, for `DataLoader(..., batch_sampler=...)`.

    Args:
        num_samples: length of the data set.
        global_batch: samples of one step over all ranks; a multiple of the world size.
        steps: steps of one pass through the loader, which is what frameworks call an epoch. None: so many that whole
            batches of `num_samples` fit. What is left of the samples comes first in the next pass.
        seed: of the permutations; the same on all ranks and in each iteration.
        shuffle: False takes the samples in their order.

    Raises ValueError for what cannot be divided so. Rank and world size are those of the default group when a pass
    begins; without one there is one rank.
    """

    def __init__(
        self, num_samples: int, global_batch: int, *, steps: int | None = None, seed: int = 0, shuffle: bool = True
    ) -> None:
        for name, value in (("num_samples", num_samples), ("global_batch", global_batch), ("steps", steps)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}: want a number from 1 on, got {value!r}")
        self._num_samples = num_samples
        self._global_batch = global_batch
        self._steps = max(num_samples // global_batch, 1) if steps is None else steps
        self._seed = seed
        self._shuffle = shuffle
        self._next = 0
        self._row: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        """Steps of a whole pass, also of one that begins in its middle."""
        return self._steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices for each step, from the next one to the end of its pass."""
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        first = self._next
        self._next = (first // self._steps + 1) * self._steps
        for step in range(first, self._next):
            yield self.of_step(step, rank, world_size)

    def of_step(self, step: int, rank: int, world_size: int) -> list[int]:
        """Return what a rank trains in a step, counted from 0."""
        if self._global_batch % world_size:
            raise ValueError(
                f"global_batch: want a multiple of the world size, got {self._global_batch} for {world_size} ranks; "
                "give the job a divisibleBy that fits"
            )
        size = self._global_batch // world_size
        start = step * self._global_batch + rank * size
        return self._piece(start, start + size)

    def start_at(self, step: int) -> None:
        """Let the next pass through the loader begin with this step, counted from 0: so many steps have been made."""
        if not isinstance(step, int) or not 0 <= step < 1 << 62:
            raise ValueError(f"step: want a number from 0 on, got {step!r}")
        self._next = step

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this one, counted from 0, from its beginning. Frameworks call it before each."""
        self.start_at(epoch * self._steps)

    def describe(self) -> dict[str, Any]:
        """Return what must be the same wherever training goes on: a checkpoint keeps it for `check`.

        Not named `state_dict`: loaders with a state would take it for the place, and skip nothing.
        """
        return {
            "num_samples": self._num_samples,
            "global_batch": self._global_batch,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Compare with what was saved. Raises ValueError where a step's number would mean another place in the data."""
        own = self.describe()
        if different := [name for name in own if state.get(name) != own[name]]:
            want, got = ({name: one.get(name) for name in different} for one in (state, own))
            raise ValueError(f"samples: want {want}, as in the checkpoint, got {got}; else samples come twice or never")

    def _piece(self, start: int, stop: int) -> list[int]:
        """Return the part of the endless row from `start` up to `stop`."""
        found: list[int] = []
        while start < stop:
            number, at = divmod(start, self._num_samples)
            length = min(stop - start, self._num_samples - at)
            found += self._permutation(number)[at : at + length].tolist()
            start += length
        return found

    def _permutation(self, number: int) -> torch.Tensor:
        if number not in self._row:
            # A step has parts of two at most where the data are larger than it.
            self._row = {key: row for key, row in self._row.items() if key == number - 1}
            chance = torch.Generator().manual_seed((self._seed + number) % (1 << 63))
            shuffled = torch.randperm(self._num_samples, generator=chance)
            self._row[number] = shuffled if self._shuffle else torch.arange(self._num_samples)
        return self._row[number]
