"""How ranks agree on what to restore: small collectives of numbers over the default group, and nothing pickled."""

import logging
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)


class AskedOptions(NamedTuple):
    """What a script asks of its checkpoints, on this rank. Numbers, as they are compared."""

    kind: int
    """Of what is given as `disk`: 0 for nothing, 1 for a folder, 2 for an object."""
    path: int
    """Checksum of the folder's path."""
    disk_every: int
    """0: nothing is written in the background."""
    disk_keep: int
    every: int
    is_every_told: int
    """By the script. Else by the job: pods of two templates, of which one replaces the other, may have other ones."""

    @property
    def of_script(self) -> tuple[int, ...]:
        """What all ranks run the same collectives by, since they run one script."""
        return self.kind, self.disk_every, self.disk_keep, self.is_every_told, self.every if self.is_every_told else 0

    def __str__(self) -> str:
        disk = ("no disk", "a folder in `disk`", "an object in `disk`")[self.kind]
        every = f"every={self.every}" if self.is_every_told else "no every"
        more = f", disk_every={self.disk_every}, disk_keep={self.disk_keep}" if self.disk_every else ""
        return f"{every}, {disk}{more}"


def agreed_every(own: AskedOptions) -> int:
    """Return the `every` of all ranks. A collective of all ranks.

    Raises ValueError, on all of them, where the scripts of two ranks ask for different things: they would wait in
    different collectives, or save different steps.
    """
    asked = [AskedOptions(*row) for (row,) in gather([own], len(own))]
    first = asked[0]
    for rank, one in enumerate(asked):
        if one.of_script != first.of_script:
            raise ValueError(
                f"Checkpointer: want the same on all ranks, got {first} on rank 0, and {one} on rank {rank}"
            )
    if own.path != first.path:
        logger.warning("disk: rank 0 has another path: no checkpoint is whole there but where both are one folder")
    if own.every != first.every:
        logger.warning(
            "checkpoints in memory: every %d steps, as rank 0 was told, here it is %d", first.every, own.every
        )
    return first.every


def gather(rows: Sequence[Sequence[int]], width: int) -> list[list[list[int]]]:
    """Return the rows of each rank; all have `width` numbers. A lone process has its own alone."""
    if not _is_group():
        return [[list(row) for row in rows]]
    device, world_size = _device(), dist.get_world_size()
    count = torch.tensor([len(rows)], dtype=torch.int64, device=device)
    counts = [torch.zeros_like(count) for _ in range(world_size)]
    dist.all_gather(counts, count)
    lengths = [int(one.item()) for one in counts]
    most = max(lengths)
    if most == 0:
        return [[] for _ in lengths]
    mine = torch.zeros((most, width), dtype=torch.int64, device=device)
    if rows:
        mine[: len(rows)] = torch.tensor(rows, dtype=torch.int64)
    gathered = [torch.zeros_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return [one[:length].tolist() for one, length in zip(gathered, lengths, strict=True)]


def of_rank_0(text: str) -> str:
    """Return what rank 0 has, on all ranks; texts that are the same cost one small collective."""
    data = text.encode()
    told = gather([[len(data), zlib.crc32(data)]], 2)
    if all(row == told[0] for row in told):
        return text
    device = _device()
    shared = torch.zeros(told[0][0][0], dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        shared.copy_(torch.tensor(list(data), dtype=torch.uint8))
    dist.broadcast(shared, src=0)
    return bytes(shared.tolist()).decode()


def all_true(is_true: bool) -> bool:
    """Return whether it is true on all ranks."""
    return all(row == [[1]] for row in gather([[int(is_true)]], 1))


def _is_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _device() -> torch.device:
    if "gloo" in dist.get_backend() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
