"""The preflight of a pod in an image that does what it likes; a `sitecustomize` calls `behave` before it begins."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_MODULE = "unbroken.preflight.in_pod"


def _break_products() -> None:
    import torch

    sound = torch.matmul

    def broken(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = sound(left, right)
        product[7, 3] += 1
        return product

    vars(torch)["matmul"] = broken


def _hang_in_products() -> None:
    import torch

    vars(torch)["matmul"] = lambda *_: signal.pause()


def _hide_torch() -> None:
    # Python's own way to say that a module must not be found, though with other words.
    vars(sys)["modules"]["torch"] = None


_OF_TORCH: dict[str, Callable[[], object]] = {
    "well": lambda: None,
    "product": _break_products,
    "hanging-product": _hang_in_products,
    "no-torch": _hide_torch,
}


def _say(data: bytes) -> None:
    os.write(1, data)


def _flood(data: bytes) -> None:
    while True:
        _say(data)


def _hang_deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The child holds the pipe open.
    pid = os.fork()
    if pid:
        Path(os.environ["HOSTILE_PIDS"]).write_text(f"{os.getpid()} {pid}")


def _line() -> bytes:
    return os.environ["HOSTILE_LINE"].encode() + b"\n"


_AFTER_A_LINE: dict[str, Callable[[], object]] = {
    "hang": _hang_deaf,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "close": lambda: os.close(1),
    "flood": lambda: _flood(b"x" * 65_536),
    "lines": lambda: _flood(_line()),
    "garbage": lambda: _say(b"\xff\x00 no JSON {\n"),
    "exit": lambda: os._exit(77),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


def behave(kind: str) -> None:
    """Do what is asked for in a preflight; return in any other process, and where the preflight is to go on."""
    if _MODULE not in sys.orig_argv:
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    if kind in _OF_TORCH:
        _OF_TORCH[kind]()
        return
    _say(_line())
    _AFTER_A_LINE[kind]()
    while True:
        signal.pause()


if __name__ == "sitecustomize":
    behave(os.environ.get("HOSTILE", ""))
