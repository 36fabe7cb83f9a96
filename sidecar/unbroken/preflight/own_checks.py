"""What a host says of itself before it tests with others: versions, devices, a multiplication, a loopback collective.

Each part runs in a child of its own, so that a GPU that hangs is a finding, and hides no other one.
"""

import ctypes
import functools
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined] # torch does not export them by name

from unbroken.preflight.exchange import Seat, WrongDataError, exchange, told
from unbroken.preflight.forked import ChildAnswer, EndedError, StarvedError, answer_of, answers_of
from unbroken.preflight.meeting import first_line
from unbroken.preflight.outcomes import CheckEnding, CheckOutcome
from unbroken.watch.errors import NotCheckedError
from unbroken.watch.nvml import Library

_CPU_SIZE, _GPU_SIZE = 256, 4096
_LOOPBACK_BYTES = 1 << 20
_FACTS_LIMIT_S = 60.0

Check = dict[str, str]
"""`check`, `entity`, `verdict` (ok, bad, unknown), `message`."""


@dataclass(frozen=True)
class PartOfChecks:
    """What one part of the checks has found."""

    outcomes: tuple[CheckOutcome, ...]
    gpus: int = 0
    versions: dict[str, str] = field(default_factory=dict)


def own_checks(num_devices: int | None, limit_s: float, is_verbose: bool = False) -> dict[str, Any]:
    """Return versions, the number of GPUs and the findings of all checks. `num_devices`: the GPUs that there should be.

    None: as many as there are.
    """
    versions: dict[str, str] = {}
    gpus, checks = 0, []
    for part in parts(num_devices, lambda _num_left: limit_s):
        versions, gpus = part.versions, part.gpus
        checks += [_check(outcome) for outcome in part.outcomes]
    return {"versions": versions, "gpus": gpus, "checks": checks}


def parts(num_devices: int | None, limit_of: Callable[[int], float]) -> Iterator[PartOfChecks]:
    """Run the checks, and yield what each part of them has found: devices, products, the loopback collective.

    `limit_of` returns for how long a part may run, when so many are left, itself included.
    """
    limit_s = limit_of(3)
    try:
        facts = answer_of(_facts, min(limit_s, _FACTS_LIMIT_S))
    except (TimeoutError, EndedError) as error:
        ending, why = _reason(error, min(limit_s, _FACTS_LIMIT_S))
        yield PartOfChecks((CheckOutcome("devices", "", ending, f"torch does not say which GPUs there are: {why}"),))
        return
    gpus, versions = int(facts["gpus"]), dict(facts["versions"])
    yield PartOfChecks((_counted(gpus, int(facts["nvml"]), num_devices, versions),), gpus, versions)
    devices = [f"cuda:{number}" for number in range(gpus)] or ["cpu"]
    names, limit_s = ["cpu", *devices[: gpus or 0]], limit_of(2)
    products = answers_of([functools.partial(_multiply, device) for device in names], limit_s)
    found = (CheckOutcome("matmul", name, *_said(each, limit_s)) for name, each in zip(names, products, strict=True))
    yield PartOfChecks(tuple(found), gpus, versions)
    yield PartOfChecks((CheckOutcome("loopback", "", *_loopback(devices, limit_of(1))),), gpus, versions)


def _check(outcome: CheckOutcome) -> Check:
    # A host that is busy is not broken.
    bad = "unknown" if outcome.ending is CheckEnding.STARVED else "bad"
    verdict = bad if outcome.message else "ok"
    return {"check": outcome.check, "entity": outcome.entity, "verdict": verdict, "message": outcome.message}


def _reason(error: Exception | None, limit_s: float) -> tuple[CheckEnding, str]:
    if isinstance(error, StarvedError):
        return CheckEnding.STARVED, f"no end within {limit_s:.3g} s, as this host is busy: it waited for a core"
    if isinstance(error, TimeoutError):
        return CheckEnding.SILENT, f"no end within {limit_s:.3g} s"
    is_killed = isinstance(error, EndedError) and error.number == signal.SIGKILL
    return CheckEnding.KILLED if is_killed else CheckEnding.DEAD, f"its process {error}"


def _said(answer: ChildAnswer, limit_s: float) -> tuple[CheckEnding, str]:
    """Return how a check has ended by what its process says: the word of an ending, and the message."""
    if answer.error is not None:
        return _reason(answer.error, limit_s)
    ending, message = answer.value
    return CheckEnding(ending), str(message)


def _counted(gpus: int, seen: int, wanted: int | None, versions: dict[str, str]) -> CheckOutcome:
    message, ending = "", CheckEnding.WELL
    if wanted is not None and gpus != wanted:
        message, ending = f"want {wanted} GPUs, got {gpus}", CheckEnding.WRONG if gpus < wanted else CheckEnding.MORE
    elif versions.get("cuda") and seen > 0 and gpus == 0:
        message, ending = f"torch can use none of the {seen} GPUs that the driver shows", CheckEnding.WRONG
    return CheckOutcome("devices", "", ending, message)


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


def _multiply(name: str) -> tuple[CheckEnding, str]:
    """Return what is wrong with products of which each number is known exactly."""
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
                    return CheckEnding.WRONG, f"{what}: {num_wrong} of {wanted.numel()} products are wrong"
    except Exception as error:
        return CheckEnding.ERROR, f"{type(error).__name__}: {first_line(error)}"
    return CheckEnding.WELL, ""


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


def _loopback(devices: Sequence[str], limit_s: float) -> tuple[CheckEnding, str]:
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
            ending, why = _reason(answer.error, limit_s)
            return ending, f"rank {rank}: {why}"
        if not answer.value["passed"]:
            why = str(answer.value["why"])
            is_wrong = why.startswith(WrongDataError.__name__)
            return CheckEnding.WRONG if is_wrong else CheckEnding.ERROR, f"rank {rank}: {why}"
    return CheckEnding.WELL, ""


def _loopback_rank(path: Path, rank: int, devices: Sequence[str], limit_s: float) -> dict[str, object]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = FileStore(str(path), len(devices))
    seat = Seat(rank, len(devices), torch.device(devices[rank]))
    return told(lambda: exchange(store, seat, _LOOPBACK_BYTES, limit_s))
