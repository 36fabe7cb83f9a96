"""What ranks exchange to test each other: data that all know, so that a wrong byte is seen."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # torch does not export them by name

REPEATS = 3
_MAX_VALUE = 1 << 20


class WrongDataError(Exception):
    """What came is not what was sent."""


@dataclass(frozen=True)
class Seat:
    """A rank's place in an exchange."""

    rank: int
    world_size: int
    device: torch.device


def exchange(store: Store, seat: Seat, num_bytes: int, limit_s: float) -> float:
    """Gather and sum what each rank has, several times; return the shortest seconds of one gathering.

    Raises WrongDataError, and what torch raises.
    """
    rank, world_size, device = seat.rank, seat.world_size, seat.device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=max(limit_s, 1.0))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    wait = torch.cuda.synchronize if device.type == "cuda" else _no_wait
    mine = _pattern(rank, num_bytes, device)
    expected = [_pattern(number, num_bytes, device) for number in range(world_size)]
    expected_sum = torch.stack(expected).sum(0, dtype=torch.int32)
    shortest_s = float("inf")
    for _ in range(REPEATS):
        parts = [torch.empty_like(mine) for _ in range(world_size)]
        wait()
        begin_s = time.monotonic()
        dist.all_gather(parts, mine)
        wait()
        shortest_s = min(shortest_s, time.monotonic() - begin_s)
        for number, part in enumerate(parts):
            _compare(part, expected[number], f"all_gather: from rank {number}")
        total = mine.clone()
        dist.all_reduce(total)
        wait()
        _compare(total, expected_sum, "all_reduce")
    _part()
    return shortest_s


def _no_wait() -> None:
    return


def _part() -> None:
    """Wait for the others, so that nobody is gone while another still receives. What was to be seen has been seen."""
    try:
        dist.barrier()
    except Exception:
        return


def _pattern(rank: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    numbers = torch.arange(num_bytes // 4, dtype=torch.int64, device=device)
    return ((numbers * 2654435761 + (rank + 1) * 40503) % _MAX_VALUE).to(torch.int32)


def _compare(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(got, wanted):
        num_wrong = int((got != wanted).sum())
        raise WrongDataError(f"{what}: {num_wrong} of {wanted.numel()} numbers are wrong")


def told(function: Callable[[], float]) -> dict[str, object]:
    """Return how an exchange has ended, in words."""
    try:
        return {"passed": True, "seconds": function(), "why": ""}
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        return {"passed": False, "seconds": 0.0, "why": f"{type(error).__name__}: {first}"[:300]}
