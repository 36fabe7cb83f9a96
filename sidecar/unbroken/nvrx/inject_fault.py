"""Faults on purpose, for tests of a training script: on some of the ranks, after a delay, in a thread."""

import contextlib
import ctypes
import enum
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "Fault",
    "InjectedException",
    "clear_workload_exception",
    "dispatch_fault_injection",
    "inject_fault",
    "maybe_raise_workload_exception",
    "register_fault",
]

logger = logging.getLogger(__name__)

Callback = Callable[[], Any] | None
_GIL_LOCKED_S = 24 * 3600


class Fault(enum.Enum):
    """Kinds of faults."""

    GPU_ERROR = enum.auto()
    """A device-side assertion: the CUDA context is lost."""
    GPU_SLEEP = enum.auto()
    """A kernel that does not end."""
    WORKLOAD_EXC = enum.auto()
    """`maybe_raise_workload_exception` raises in the script."""
    ASYNC_EXC = enum.auto()
    """An exception in the main thread, wherever it is."""
    SIGNAL_EXC = enum.auto()
    """The same from the handler of a signal, which also ends a sleep."""
    OS_ABORT = enum.auto()
    LOCK_GIL = enum.auto()
    """C code that keeps the GIL."""
    SEGFAULT = enum.auto()
    SIGINT = enum.auto()
    SIGKILL = enum.auto()
    SIGTERM = enum.auto()
    SIGSTOP = enum.auto()


class InjectedException(Exception):
    """Raised by some of the faults."""


_registered: dict[str, Callable[[float, Callback], Any]] = {}
_due = threading.Event()


def register_fault(fault_name_or_enum: str | Fault, handler: Callable[[float, Callback], Any]) -> None:
    """Let `handler(delay, callback)` make a fault of this name."""
    _registered[_name(fault_name_or_enum)] = handler


def dispatch_fault_injection(fault: str | Fault, delay: float, callback: Callback) -> None:
    """Make a fault after a delay in seconds, and call `callback` just before. Raises ValueError for an unknown one."""
    name = _name(fault)
    if name in _registered:
        _registered[name](delay, callback)
        return
    if name not in Fault.__members__:
        known = ", ".join([*Fault.__members__, *sorted(_registered)])
        raise ValueError(f"fault: want one of {known}, got {fault!r}")
    kind = Fault[name]
    if kind is Fault.SIGNAL_EXC:
        # Only the main thread may set a handler.
        signal.signal(signal.SIGUSR1, _raise_from_signal)
    _after(delay, callback, _MAKERS[kind], name)


def maybe_raise_workload_exception() -> None:
    """Raise InjectedException if a WORKLOAD_EXC is due, once."""
    if _due.is_set():
        _due.clear()
        raise InjectedException("injected by WORKLOAD_EXC")


def clear_workload_exception() -> None:
    """Forget a WORKLOAD_EXC that is due."""
    _due.clear()


def inject_fault(  # noqa: PLR0917 - the extension's order
    faults: Sequence[Fault],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    callback: Callback = None,
) -> None:
    """Make one of `faults` on some ranks, which all ranks choose alike by the seed.

    Args:
        num_faults: how many ranks, or from and to how many.
        keep_alive: so many of the lowest ranks are spared.
        delay: seconds, or from and to how many.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    generator = random.Random(seed)
    fewest, most = (num_faults, num_faults) if isinstance(num_faults, int) else num_faults
    delay_s = generator.uniform(*delay) if isinstance(delay, tuple) else float(delay)
    count = max(min(generator.randint(fewest, most), world_size - keep_alive), 0)
    ranks = generator.sample(range(min(keep_alive, world_size), world_size), count)
    fault = generator.choice(list(faults))
    if rank in ranks:
        logger.info("injects: fault=%s ranks=%s delay=%.3fs seed=%d", fault.name, ranks, delay_s, seed)
        dispatch_fault_injection(fault, delay_s, callback)


def _name(fault: str | Fault) -> str:
    return fault.name if isinstance(fault, Fault) else fault


def _after(delay_s: float, callback: Callback, make: Callable[[], object], name: str) -> None:
    def run() -> None:
        time.sleep(delay_s)
        if callback is not None:
            callback()
        logger.critical("injects now: %s in process %d", name, os.getpid())
        make()

    threading.Thread(target=run, name=f"inject-{name}", daemon=True).start()


def _raise_from_signal(_number: int, _frame: object) -> None:
    raise InjectedException("injected by SIGNAL_EXC")


def _raise_in_main_thread() -> None:
    main = threading.main_thread().ident
    if main is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(InjectedException))


def _lock_gil() -> None:
    # PyDLL keeps the GIL for the time of the call.
    ctypes.PyDLL(None).sleep(_GIL_LOCKED_S)


def _fail_on_gpu() -> None:
    import torch  # noqa: PLC0415 - only for faults of a device

    outside = torch.tensor([1 << 40], device="cuda")
    # The stream raises it in whoever waits next.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")[outside]
        torch.cuda.synchronize()


def _sleep_on_gpu() -> None:
    import torch  # noqa: PLC0415 - only for faults of a device

    # Undocumented, and the way in which torch's own tests do it; cycles, about an hour.
    torch.cuda._sleep(1 << 42)


def _send(number: signal.Signals) -> Callable[[], object]:
    return lambda: os.kill(os.getpid(), number)


_MAKERS: dict[Fault, Callable[[], object]] = {
    Fault.GPU_ERROR: _fail_on_gpu,
    Fault.GPU_SLEEP: _sleep_on_gpu,
    Fault.WORKLOAD_EXC: _due.set,
    Fault.ASYNC_EXC: _raise_in_main_thread,
    Fault.SIGNAL_EXC: _send(signal.SIGUSR1),
    Fault.OS_ABORT: os.abort,
    Fault.LOCK_GIL: _lock_gil,
    Fault.SEGFAULT: lambda: ctypes.string_at(1),
    Fault.SIGINT: _send(signal.SIGINT),
    Fault.SIGKILL: _send(signal.SIGKILL),
    Fault.SIGTERM: _send(signal.SIGTERM),
    Fault.SIGSTOP: _send(signal.SIGSTOP),
}
