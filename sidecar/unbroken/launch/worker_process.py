"""A worker's place and its newest process, as the launcher knows them; and the environment of that process."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.launch.config import LaunchConfig
from unbroken.launch.error_file import MAX_ERROR_CHARACTERS
from unbroken.launch.output import Log, Stream
from unbroken.launch.ports import HeldPort
from unbroken_core.pod.pod_messages import ProcessState, Spawn


@dataclass
class WorkerProcess:
    """One process; another one takes its place with nothing that belonged to it."""

    incarnation: int = -1
    """-1 before the first."""
    pid: int = 0
    exit_code: int | None = None
    """Set once the process is reaped."""
    coming_exit_code: int | None = None
    """Set while it is still ending."""
    error: str = ""
    streams: list[Stream] = field(default_factory=list)
    kill_at_s: float | None = None
    is_told_to_end: bool = False
    log: Log | None = None
    log_stack_at_s: float | None = None
    is_forked: bool = False
    has_crashed: bool = False
    """Whether it was forked and crashed: the next one is not forked, in case the fork was to blame."""

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or was not reaped yet."""
        return self.pid > 0 and self.exit_code is None


@dataclass
class LocalWorker:
    """One local rank."""

    local_rank: int
    port: HeldPort
    process: WorkerProcess = field(default_factory=WorkerProcess)
    """The newest that runs or has run."""
    next_order: Spawn | None = None
    """What to start once that process is reaped."""
    ordered: Spawn | None = None
    """The process that is being forked; it is not reported before it runs."""

    @property
    def is_alive(self) -> bool:
        """Whether its process runs, or was not reaped yet."""
        return self.process.is_alive

    @property
    def state(self) -> ProcessState:
        """The place as it is reported to the agent."""
        process = self.process
        known = process.coming_exit_code if process.exit_code is None else process.exit_code
        exit_code = known if process.incarnation >= 0 else None
        return ProcessState(
            self.local_rank, process.incarnation, process.pid, exit_code, process.error, self.port.number
        )

    def renew(self, incarnation: int) -> None:
        """Expect another process, once all output of the one before was read."""
        for stream in self.process.streams:
            stream.drain()
        self.process = WorkerProcess(incarnation)


def common_environment(config: LaunchConfig) -> dict[str, str]:
    """Return the variables that all workers share."""
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**defaults, **config.environment, "LOCAL_WORLD_SIZE": str(config.ranks_per_pod)}


def error_path(config: LaunchConfig, local_rank: int, incarnation: int) -> Path:
    """Return the error file of one process."""
    return config.directory / "errors" / f"rank-{local_rank}-{incarnation}.json"


def worker_environment(config: LaunchConfig, order: Spawn) -> dict[str, str]:
    """Return the variables of one process; its error file is removed, and the folder made."""
    error_file = error_path(config, order.local_rank, order.incarnation)
    with contextlib.suppress(OSError):
        error_file.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        error_file.unlink(missing_ok=True)
    return {
        **common_environment(config),
        "LOCAL_RANK": str(order.local_rank),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        **order.environment,
        "UNBROKEN_LOCAL_RANK": str(order.local_rank),
        "UNBROKEN_INCARNATION": str(order.incarnation),
    }


def why_not_started(command: str, error: Exception, environment: Mapping[str, str]) -> str:
    """Return one line about a command that could not be started."""
    if isinstance(error, FileNotFoundError):
        path = environment.get("PATH", os.defpath)
        where = "no such file" if "/" in command else f"not found in PATH ({path})"
        if "/" in command and Path(command).exists():
            where = "the interpreter named in its first line does not exist"
        return f"command {command!r}: {where}"[:MAX_ERROR_CHARACTERS]
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"command {command!r}: cannot be started: {reason}"[:MAX_ERROR_CHARACTERS]
