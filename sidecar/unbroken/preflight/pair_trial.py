"""One host's part in the test of a pair: a child for each GPU, or one, which meets those of the partner."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not export them by name

from unbroken.preflight.exchange import Seat, exchange, told
from unbroken.preflight.forked import answers_of
from unbroken.preflight.meeting import MeetingError, MeetingPlace

CPU_BYTES, GPU_BYTES = 4 << 20, 64 << 20


def try_pair(place: MeetingPlace, task: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Return how it went: `passed`, `why`, `gbits`. `task`: `meeting`, `side` (0, 1) and `gpus` of each of the two."""
    gpus = int(task["gpus"])
    num_ranks = max(gpus, 1)
    parts: list[Callable[[], Any]] = [
        functools.partial(_rank, place, str(task["meeting"]), _seat(int(task["side"]), number, gpus), limit_s)
        for number in range(num_ranks)
    ]
    slowest_s = 0.0
    for answer in answers_of(parts, limit_s):
        if isinstance(answer.error, TimeoutError):
            return _failed(f"no end within {limit_s:g} s; a busy host takes longer, see --pair-timeout")
        if answer.error is not None:
            return _failed(f"the process of the test {answer.error}")
        if not answer.value["passed"]:
            return _failed(str(answer.value["why"]))
        slowest_s = max(slowest_s, float(answer.value["seconds"]))
    num_bytes = num_ranks * (GPU_BYTES if gpus else CPU_BYTES)
    return {"passed": True, "why": "", "gbits": 8e-9 * num_bytes / max(slowest_s, 1e-9)}


def _failed(why: str) -> dict[str, Any]:
    return {"passed": False, "why": why, "gbits": 0.0}


def _seat(side: int, number: int, gpus: int) -> Seat:
    num_ranks = max(gpus, 1)
    device = torch.device("cuda", number) if gpus else torch.device("cpu")
    return Seat(side * num_ranks + number, 2 * num_ranks, device)


def _rank(place: MeetingPlace, meeting: str, seat: Seat, limit_s: float) -> dict[str, object]:
    def meet() -> float:
        try:
            store = PrefixStore(meeting, place.store(limit_s))
        except MeetingError as error:
            raise RuntimeError(f"the leader's store: {error}") from error
        return exchange(store, seat, CPU_BYTES if seat.device.type == "cpu" else GPU_BYTES, limit_s)

    return told(meet)
