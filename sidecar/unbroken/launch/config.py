"""The launcher's settings. No other module of this package reads the environment or the arguments."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unbroken.launch.python_command import modules_in
from unbroken_core.conventions.environment import needed
from unbroken_core.protocol.settings import MAX_RANKS_PER_POD
from unbroken_core.vocabulary.errors import InputError

DEFAULT_GRACE_S = 5.0
DEFAULT_AGENT_TIMEOUT_S = 60.0
_PAIRS = {"1": "auto", "gloo": "gloo"}


@dataclass(frozen=True)
class LaunchConfig:
    """Everything that a launcher needs to start."""

    command: tuple[str, ...]
    ranks_per_pod: int
    directory: Path
    pod: str
    pod_ip: str
    log_dir: Path | None
    """None: output goes to the console only."""
    grace_s: float
    """Seconds between SIGTERM and SIGKILL when the pod itself is terminated."""
    drain_s: float
    """Seconds for which workers may train on when the pod is terminated, until their ranks have moved."""
    agent_timeout_s: float
    """Seconds for which the launcher waits for its agent at the start."""
    environment: Mapping[str, str]
    """What the workers inherit."""
    is_supervised: bool
    """Whether who started the launcher says itself that it waits, and how the job ended."""
    does_name_processes: bool
    """Whether each worker's process is named when it starts."""
    watch_delay_s: float | None
    """How long after the first worker the watch on devices and links is started; None: there is none."""
    preflight_s: float | None
    """How long the pod may test itself before its first process; None: it does not."""
    preflight_devices: int | None
    """GPUs that it should find then; None: as many as there are."""
    preflight_pairs: str
    """By what it tests with other pods after that, while it has no ranks: auto (NCCL where both have GPUs), or gloo.
    "": it does not."""
    preimport: tuple[str, ...] | None
    """Modules that the fork server imports once; (): no fork server; None: what the script imports."""


def read_config(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> LaunchConfig:
    """Read arguments and environment. Raises InputError that names what is wrong; SystemExit for --help."""
    source = dict(os.environ if environment is None else environment)
    parser = argparse.ArgumentParser(
        prog="python -m unbroken.launch", description="Start the workers of a pod, as its agent says."
    )
    parser.add_argument("--grace", type=float, default=DEFAULT_GRACE_S, metavar="SECONDS")
    parser.add_argument("--agent-timeout", type=float, default=DEFAULT_AGENT_TIMEOUT_S, metavar="SECONDS")
    parser.add_argument("--supervised", action="store_true", help="leave the ends of the job to who started this")
    parser.add_argument("--name-processes", action="store_true", help="name each worker's process when it starts")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the worker's command and its arguments")
    parsed = parser.parse_args(list(arguments))
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        raise InputError("command: want `python -m unbroken.launch -- COMMAND ARGUMENTS...`, got no command")
    for name, value in (("--grace", parsed.grace), ("--agent-timeout", parsed.agent_timeout)):
        if not 0 <= value < float("inf"):
            raise InputError(f"{name}: want seconds, at least 0, got {value}")
    log_dir = source.get("UNBROKEN_LOG_DIR", "")
    return LaunchConfig(
        command=tuple(command),
        ranks_per_pod=_ranks_per_pod(source.get("UNBROKEN_RANKS_PER_POD", "1")),
        directory=Path(needed(source, "UNBROKEN_DIR")),
        pod=source.get("UNBROKEN_POD", "pod"),
        pod_ip=source.get("UNBROKEN_POD_IP", "127.0.0.1"),
        log_dir=Path(log_dir) if log_dir else None,
        grace_s=parsed.grace,
        drain_s=_seconds(source, "UNBROKEN_DRAIN"),
        agent_timeout_s=parsed.agent_timeout,
        environment=source,
        is_supervised=parsed.supervised,
        does_name_processes=parsed.name_processes,
        watch_delay_s=_seconds(source, "UNBROKEN_WATCH_DELAY", "5") if source.get("UNBROKEN_WATCH") == "1" else None,
        preflight_s=_seconds(source, "UNBROKEN_PREFLIGHT") if source.get("UNBROKEN_PREFLIGHT") else None,
        preflight_devices=_devices(source),
        preflight_pairs=_PAIRS.get(source.get("UNBROKEN_PREFLIGHT_PAIRS", ""), ""),
        preimport=_preimport(source.get("UNBROKEN_PREIMPORT")),
    )


def _preimport(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    try:
        return modules_in(text)
    except ValueError as error:
        raise InputError(f"UNBROKEN_PREIMPORT: {error}") from None


def _seconds(source: Mapping[str, str], name: str, usual: str = "0") -> float:
    text = source.get(name, usual)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InputError(f"{name}: want seconds, at least 0, got {text!r}")
    return seconds


def _devices(source: Mapping[str, str]) -> int | None:
    """Return how many GPUs there should be; None where nobody says, or the pod hides some from itself."""
    text = source.get("UNBROKEN_PREFLIGHT_DEVICES", "")
    if not text or "CUDA_VISIBLE_DEVICES" in source:
        return None
    if not text.isascii() or not text.isdigit():
        raise InputError(f"UNBROKEN_PREFLIGHT_DEVICES: want a number, got {text!r}")
    return int(text)


def _ranks_per_pod(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_RANKS_PER_POD:
        raise InputError(f"UNBROKEN_RANKS_PER_POD: want 1 to {MAX_RANKS_PER_POD}, got {text!r}")
    return int(text)
