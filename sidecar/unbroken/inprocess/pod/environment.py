"""Environment variables: those that the launcher sets, and those that the wrapper sets for the function and torch."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken import restored_to
from unbroken.inprocess.exception import NoAgentError
from unbroken_core.pod.fault_orders import is_allowed
from unbroken_core.pod.pod_messages import Enter

logger = logging.getLogger(__name__)

NCCL_ERRORS_END_PROCESS = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
"""A variable of torch, on by default: an error of NCCL then ends the process up to a minute later, from a thread."""
_OFF = frozenset({"0", "n", "no", "f", "false"})
"""Values that torch reads as off, in any case."""


@dataclass(frozen=True)
class PodContext:
    """Where this worker stands in its pod."""

    folder: Path
    """Holds agent.sock and stamps."""
    local_rank: int
    incarnation: int
    local_world_size: int
    pod_address: str
    """Numeric address at which other pods reach this one."""
    is_in_process: bool = True
    """False: the job starts processes again, each for one iteration, and rank 0's own process serves the store."""
    allows_faults: bool = False
    """Whether this worker takes orders to break itself (unbroken.inprocess.faults)."""


def read_pod_context(environment: Mapping[str, str]) -> PodContext:
    """Raises NoAgentError when the process was not started by the launcher."""
    folder = environment.get("UNBROKEN_DIR", "")
    if not folder:
        raise NoAgentError(
            "UNBROKEN_DIR is not set: there is no agent in this pod. Start the script with "
            "`unbroken run --pods N --ranks-per-pod M script.py`, or as a ResilientTrainingJob"
        )
    return PodContext(
        folder=Path(folder),
        local_rank=_number(environment, "UNBROKEN_LOCAL_RANK"),
        incarnation=_number(environment, "UNBROKEN_INCARNATION"),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE") or environment.get("UNBROKEN_RANKS_PER_POD") or "1"),
        pod_address=environment.get("UNBROKEN_POD_IP") or "127.0.0.1",
        is_in_process=environment.get("UNBROKEN_IN_PROCESS") != "0",
        allows_faults=is_allowed(environment),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise NoAgentError(f"{name}: want a number from Unbroken's launcher, got {text!r}")
    return int(text)


def variables(place: PodContext, plan: Enter, run_id: str) -> dict[str, str]:
    """Return torchrun's variables for an active worker in one iteration."""
    rank, size, local_size = plan.rank or 0, plan.world_size, place.local_world_size
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(rank // local_size),
        "GROUP_WORLD_SIZE": str(-(-size // local_size)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": plan.master_host,
        "MASTER_PORT": str(plan.master_port),
        # In process, rank 0 serves the store before the function starts: in it, every rank is a client.
        "TORCHELASTIC_USE_AGENT_STORE": str(place.is_in_process),
        "TORCHELASTIC_RESTART_COUNT": str(plan.iteration),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.iteration),
        "TORCHELASTIC_RUN_ID": run_id,
        "UNBROKEN_TERM": str(plan.term),
        # Also where the wrapper found its agent by itself: checkpoints in memory ask its keeper.
        "UNBROKEN_POD_FOLDER": str(place.folder),
    }


def export(place: PodContext, plan: Enter) -> None:
    """Set the variables of an iteration in this process. Values that are short, or stay: glibc keeps each of them."""
    os.environ.pop(restored_to.VARIABLE, None)
    restored_to.told.restore = plan.restore
    os.environ.update(variables(place, plan, os.environ.get("TORCHELASTIC_RUN_ID") or "unbroken"))


def survive_nccl_errors() -> None:
    """Keep torch from ending the process when NCCL fails, for groups that are made from now on.

    The loss of a peer is such an error; torch would end a process whose function has long been started again. A value
    that is set stays, with a warning.
    """
    value = os.environ.setdefault(NCCL_ERRORS_END_PROCESS, "0")
    if value.lower() not in _OFF:
        logger.warning(
            "torch ends this process after an error of NCCL, also after a restart: %s=%s, want 0",
            NCCL_ERRORS_END_PROCESS,
            value,
        )
