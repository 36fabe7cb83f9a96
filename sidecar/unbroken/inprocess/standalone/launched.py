"""Rank and peers of this process, from the variables of torchrun, mpirun, srun and the like."""

from collections.abc import Mapping
from dataclasses import dataclass

from unbroken.inprocess.exception import NoAgentError

DEFAULT_MASTER_PORT = 29500
NUM_PORTS = 8
FIRST_PORT_OFFSET = 2
"""Counted from MASTER_PORT. That port is torchrun's store, or the script's own; scripts written for the reference use
the next one for a store of theirs."""

_FAMILIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("RANK and WORLD_SIZE", {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}),
    (
        "Open MPI",
        {
            "rank": "OMPI_COMM_WORLD_RANK",
            "world_size": "OMPI_COMM_WORLD_SIZE",
            "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
            "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
        },
    ),
    (
        "MPICH",
        {
            "rank": "PMI_RANK",
            "world_size": "PMI_SIZE",
            "local_rank": "MPI_LOCALRANKID",
            "local_world_size": "MPI_LOCALNRANKS",
        },
    ),
    (
        # SLURM_STEP_ID: a batch script has ranks in its environment as well, but was not started by srun.
        "srun",
        {"rank": "SLURM_PROCID", "world_size": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID", "step": "SLURM_STEP_ID"},
    ),
)
_OPTIONAL = ("local_rank", "local_world_size")
_HOSTS = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
_RUNS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Variables that, where set, tell runs with the same MASTER_PORT apart; the same on all hosts."""


@dataclass(frozen=True)
class Launched:
    """One worker as its launcher started it."""

    rank: int
    world_size: int
    local_rank: int | None
    master_host: str
    ports: tuple[int, ...]
    """Ports on `master_host` where the job's root may listen, in the order in which they are tried."""
    host: str
    """Tells the job's hosts apart, should several of them be one machine."""
    run: tuple[str, ...]
    """Tells jobs apart; the same on all hosts."""
    is_one_host: bool = False
    """Whether the launcher says that all workers are on this host."""


def read_launched(environment: Mapping[str, str], base_port: int | None = None, host: str = "") -> Launched | None:
    """Return None when no launcher has set its variables.

    `base_port` and `host` are the wrapper's store_kwargs. Raises NoAgentError that names a variable that is missing or
    wrong.
    """
    found = _family(environment)
    if found is None:
        return None
    name, variables = found
    rank, world_size = (_number(environment, variables[key]) for key in ("rank", "world_size"))
    if not 0 <= rank < world_size:
        raise NoAgentError(f"{variables['rank']}: want 0 to {world_size - 1} ({variables['world_size']}), got {rank}")
    local_rank = _number(environment, variables["local_rank"]) if environment.get(variables["local_rank"]) else None
    local_size = _local_size(environment, variables)
    ports = _ports(environment, base_port)
    return Launched(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        master_host=host or _master_host(environment, name, world_size, local_size),
        ports=ports,
        host=_host(environment, rank, local_size),
        run=(str(ports[0]), *(environment.get(variable, "") for variable in _RUNS)),
        is_one_host=local_size == world_size,
    )


def is_open_to_strangers(launched: Launched, secret: str) -> bool:
    """Return whether hosts of other machines can join who know nothing but the launcher's variables."""
    is_loopback = launched.master_host.startswith("127.") or launched.master_host in ("localhost", "::1")
    return not (secret or launched.is_one_host or is_loopback)


def _family(environment: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    for name, variables in _FAMILIES:
        if all(environment.get(variable) for key, variable in variables.items() if key not in _OPTIONAL):
            return name, variables
    return None


def _number(environment: Mapping[str, str], variable: str) -> int:
    text = environment.get(variable, "")
    if not (text.isascii() and text.isdecimal()):
        raise NoAgentError(f"{variable}: want a number, got {text!r}")
    return int(text)


def _local_size(environment: Mapping[str, str], variables: Mapping[str, str]) -> int | None:
    variable = variables.get("local_world_size", "LOCAL_WORLD_SIZE")
    size = _number(environment, variable) if environment.get(variable) else None
    if size == 0:
        raise NoAgentError(f"{variable}: want at least 1, got 0")
    return size


def _master_host(environment: Mapping[str, str], name: str, world_size: int, local_size: int | None) -> str:
    host = environment.get("MASTER_ADDR", "")
    if host:
        return host
    if world_size in (1, local_size):
        return "127.0.0.1"
    raise NoAgentError(
        f"MASTER_ADDR is not set, and {name} does not provide the address of rank 0's host. "
        "Export it, the same on all hosts"
    )


def _ports(environment: Mapping[str, str], base_port: int | None) -> tuple[int, ...]:
    if base_port is None and environment.get("UNBROKEN_PORT"):
        base_port = _number(environment, "UNBROKEN_PORT")
    if base_port is None:
        variable = "MASTER_PORT"
        master = _number(environment, variable) if environment.get(variable) else DEFAULT_MASTER_PORT
        base_port = master + FIRST_PORT_OFFSET
        if base_port + NUM_PORTS > 65536:
            base_port = master - FIRST_PORT_OFFSET - NUM_PORTS
    if not 1 <= base_port <= 65536 - NUM_PORTS:
        raise NoAgentError(f"port of the job's root: want 1 to {65536 - NUM_PORTS}, got {base_port}")
    return tuple(range(base_port, base_port + NUM_PORTS))


def _host(environment: Mapping[str, str], rank: int, local_size: int | None) -> str:
    for variable in _HOSTS:
        if environment.get(variable):
            return environment[variable]
    return "" if local_size is None else str(rank // local_size)
