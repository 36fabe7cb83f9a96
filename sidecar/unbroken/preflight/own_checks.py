"""What a host says of itself before it tests with others: versions, devices, a multiplication, a loopback collective.

Each part runs in a child of its own, so that a GPU that hangs is a finding, and hides no other one.
"""

import ctypes
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined] # torch does not export them by name

from unbroken.preflight.exchange import Seat, exchange, told
from unbroken.preflight.forked import ChildAnswer, EndedError, answer_of, answers_of
from unbroken.preflight.meeting import first_line
from unbroken.watch.errors import NotCheckedError
from unbroken.watch.nvml import Library

_CPU_SIZE, _GPU_SIZE = 256, 4096
_LOOPBACK_BYTES = 1 << 20
_FACTS_LIMIT_S = 60.0

Check = dict[str, str]
"""`check`, `entity`, `verdict` (ok, bad), `message`."""


def own_checks(num_devices: int | None, limit_s: float, is_verbose: bool = False) -> dict[str, Any]:
    """Return versions, the number of GPUs and the findings of all checks. `num_devices`: the GPUs that there should be.

    None: as many as there are.
    """
    try:
        facts = answer_of(_facts, min(limit_s, _FACTS_LIMIT_S))
    except (TimeoutError, EndedError) as error:
        message = f"torch does not say which GPUs there are: {_reason(error, limit_s)}"
        return {"versions": {}, "gpus": 0, "checks": [_check("devices", "", message)]}
    gpus = int(facts["gpus"])
    devices = [f"cuda:{number}" for number in range(gpus)] or ["cpu"]
    checks = [_check("devices", "", _wrong_number(gpus, int(facts["nvml"]), num_devices, facts["versions"]))]
    products = answers_of([functools.partial(_multiply, device) for device in ["cpu", *devices[: gpus or 0]]], limit_s)
    for device, product in zip(["cpu", *devices[: gpus or 0]], products, strict=True):
        checks.append(_check("matmul", device, _said(product, limit_s)))
    checks.append(_check("loopback", "", _loopback(devices, limit_s)))
    return {"versions": facts["versions"], "gpus": gpus, "checks": checks}


def _check(check: str, entity: str, message: str) -> Check:
    return {"check": check, "entity": entity, "verdict": "bad" if message else "ok", "message": message}


def _reason(error: Exception | None, limit_s: float) -> str:
    return f"no end within {limit_s:g} s" if isinstance(error, TimeoutError) else f"its process {error}"


def _said(answer: ChildAnswer, limit_s: float) -> str:
    return str(answer.value) if answer.error is None else _reason(answer.error, limit_s)


def _wrong_number(gpus: int, seen: int, wanted: int | None, versions: dict[str, str]) -> str:
    if wanted is not None and gpus != wanted:
        return f"want {wanted} GPUs, got {gpus}"
    if versions.get("cuda") and seen > 0 and gpus == 0:
        return f"torch can use none of the {seen} GPUs that the driver shows"
    return ""


def _facts() -> dict[str, Any]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver, seen = _driver()
    versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda or "", "nccl": "", "driver": driver}
    if gpus and dist.is_nccl_available():
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {"gpus": gpus, "nvml": seen, "versions": versions}


def _driver() -> tuple[str, int]:
    """Return the driver's version, and how many GPUs it shows to this container."""
    try:
        library = Library()
        name = ctypes.create_string_buffer(80)
        library.call("nvmlSystemGetDriverVersion", name, len(name))
        seen = 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else library.num_devices()
        return name.value.decode(errors="replace"), seen
    except NotCheckedError:
        return "", 0


def _multiply(name: str) -> str:
    """Return what is wrong with products of which each number is known exactly; "" when nothing is."""
    device = torch.device(name)
    size, repeats = (_CPU_SIZE, 2) if device.type == "cpu" else (_GPU_SIZE, 8)
    try:
        for dtype, factors in (
            (torch.float32, _Factors(11, 512)),
            (torch.float64, _Factors(11, 512)),
            # All sums are at most 256, so that eight bits hold them.
            (torch.bfloat16, _Factors(3, 256)),
        ):
            left, right, wanted = (each.to(dtype) for each in factors.matrices(size))
            left, right = left.to(device), right.to(device)
            for _ in range(repeats):
                got = torch.matmul(left, right).cpu()
                if not torch.equal(got, wanted):
                    num_wrong = int((got != wanted).sum())
                    what = str(dtype).removeprefix("torch.")
                    return f"{what}: {num_wrong} of {wanted.numel()} products are wrong"
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


class _Factors(NamedTuple):
    """Two matrices of small whole numbers, whose rows and columns recur, so that few sums are needed."""

    num_values: int
    inner: int

    def matrices(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return both and their product, which is computed with Python's own numbers."""
        num, half = self.num_values, self.num_values // 2
        rows = [[(3 * row + 5 * number) % num - half for number in range(self.inner)] for row in range(num)]
        columns = [[(7 * number + 2 * column) % num - half for number in range(self.inner)] for column in range(num)]
        sums = [[sum(map(int.__mul__, row, column)) for column in columns] for row in rows]
        index = torch.arange(size) % num
        return torch.tensor(rows)[index], torch.tensor(columns)[index].t(), torch.tensor(sums)[index][:, index]


def _loopback(devices: Sequence[str], limit_s: float) -> str:
    """Return what is wrong with a collective of all devices of this host; of two processes where there is no GPU."""
    is_gpu = devices[0] != "cpu"
    devices = devices if is_gpu else ["cpu", "cpu"]
    with tempfile.TemporaryDirectory(prefix="unbroken-preflight-") as folder:
        ranks: list[Callable[[], Any]] = [
            functools.partial(_loopback_rank, Path(folder) / "store", rank, devices, limit_s)
            for rank in range(len(devices))
        ]
        answers = answers_of(ranks, limit_s)
    for rank, answer in enumerate(answers):
        if answer.error is not None:
            return f"rank {rank}: {_reason(answer.error, limit_s)}"
        if not answer.value["passed"]:
            return f"rank {rank}: {answer.value['why']}"
    return ""


def _loopback_rank(path: Path, rank: int, devices: Sequence[str], limit_s: float) -> dict[str, object]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = FileStore(str(path), len(devices))
    seat = Seat(rank, len(devices), torch.device(devices[rank]))
    return told(lambda: exchange(store, seat, _LOOPBACK_BYTES, limit_s))
