"""Options of `unbroken preflight`, and what the environment says where they are silent."""

import argparse
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unbroken.preflight.versions import NAMES, BadVersion
from unbroken_core.preflight.pairing import max_rounds
from unbroken_core.vocabulary.errors import InputError

GRACE_S = 5.0
"""Beyond the limit of a pair: for a host to say that it has ended the test."""
PAIR_S = 15.0
"""A pair takes a second or two, and longer on hosts that are busy."""
_MAX_HOSTS = 4096
_MAX_LOCAL_PODS = 64
_START_S = 300.0
"""For torch to be imported, and whatever else no other limit counts."""
_EPILOG = """
examples:
  unbroken preflight --devices 8                    this host alone
  unbroken preflight --pods 4                       four pods on this host, to see what it does
  torchrun --nnodes 16 --nproc-per-node 1 ... -m unbroken.preflight --devices 8
  srun --ntasks-per-node 1 sh -c 'unbroken preflight --hosts $SLURM_NTASKS --host-rank $SLURM_PROCID --leader n0:29500'

Rank 0 prints the report, the others a line. Exit code, the same on all hosts: 0 all is well; 1 a host, a link or a
version is bad; 2 wrong options; 3 nothing is bad, and not all could be tested.
"""


@dataclass(frozen=True)
class Options:
    """What to test, and for how long."""

    num_hosts: int
    rank: int | None
    """Of this host; None: all of them are processes of this one."""
    leader: tuple[str, int]
    """Address and port; port 0: any."""
    attempt: str
    name: str
    domains: tuple[str, ...]
    devices: int | None
    """GPUs that each host should have; None: as many as it has."""
    bad_versions: tuple[BadVersion, ...]
    backend: str
    own_s: float
    arrival_s: float
    pair_s: float
    min_gbits: float | None
    output: str
    is_verbose: bool
    is_idle: bool = False
    """Another process of this host takes part."""

    @property
    def total_s(self) -> float:
        """How long all of it takes at most: each wait has its limit, and this ends what is left."""
        rounds_s = max_rounds(self.num_hosts) * (self.pair_s + GRACE_S)
        return _START_S + 4 * self.own_s + self.arrival_s + rounds_s


def make_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="unbroken preflight",
        description="Test hosts, GPUs and the links between them before a job begins, and name what is broken.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hosts = parser.add_argument_group("hosts")
    hosts.add_argument("--pods", type=int, metavar="N", help="test with so many processes of this host")
    hosts.add_argument("--hosts", type=int, metavar="N", help="number of hosts ($GROUP_WORLD_SIZE, $WORLD_SIZE, or 1)")
    hosts.add_argument("--host-rank", type=int, metavar="N", help="number of this one, from 0 ($GROUP_RANK or $RANK)")
    hosts.add_argument(
        "--leader", metavar="HOST:PORT", help="where host 0 listens ($MASTER_ADDR:$MASTER_PORT, as torchrun sets them)"
    )
    hosts.add_argument("--name", help="name of this host in the report ($UNBROKEN_POD, or the host's)")
    hosts.add_argument(
        "--domains", metavar="A/B", help="where it stands, outermost first: rack7/switch2 ($UNBROKEN_DOMAINS)"
    )
    wanted = parser.add_argument_group("what is wanted")
    wanted.add_argument("--devices", type=int, metavar="N", help="GPUs of each host (as many as it has)")
    wanted.add_argument("--min-gbits", type=float, metavar="N", help="Gbit/s of each pair of hosts (no limit)")
    wanted.add_argument(
        "--bad-version",
        action="append",
        default=[],
        metavar="NAME=VERSION",
        help=f"a version that is bad here, of {', '.join(NAMES)}: driver=560.*; may be given again",
    )
    wanted.add_argument(
        "--backend", choices=("auto", "gloo"), default="auto", help="pairs test with NCCL where both have GPUs (auto)"
    )
    times = parser.add_argument_group("time limits in seconds")
    times.add_argument("--own-timeout", type=float, default=60.0, metavar="S", help="each check of a host alone (60)")
    times.add_argument("--arrival-timeout", type=float, default=180.0, metavar="S", help="until all have come (180)")
    times.add_argument(
        "--pair-timeout", type=float, default=PAIR_S, metavar="S", help="one test of a pair (%(default)g)"
    )
    other = parser.add_argument_group("other")
    other.add_argument("-o", "--output", choices=("text", "json"), default="text", help="(%(default)s)")
    other.add_argument("--verbose", action="store_true", help="show what torch and NCCL print")
    return parser


def read_options(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> Options:
    """Return the options. Raises InputError."""
    parsed = make_parser().parse_args(arguments)
    num_hosts, rank, is_idle = _place(parsed, environment)
    most = _MAX_LOCAL_PODS if rank is None else _MAX_HOSTS
    if not 1 <= num_hosts <= most:
        raise InputError(f"number of hosts: want 1 to {most}, got {num_hosts}")
    if rank is not None and not 0 <= rank < num_hosts:
        raise InputError(f"--host-rank: want 0 to {num_hosts - 1}, got {rank}")
    for option, value in (
        ("--own-timeout", parsed.own_timeout),
        ("--arrival-timeout", parsed.arrival_timeout),
        ("--pair-timeout", parsed.pair_timeout),
    ):
        if not 1 <= value <= 3600:
            raise InputError(f"{option}: want 1 to 3600 seconds, got {value:g}")
    for option, value in (("--devices", parsed.devices), ("--min-gbits", parsed.min_gbits)):
        if value is not None and not value >= 0:
            raise InputError(f"{option}: want 0 or more, got {value:g}")
    domains = parsed.domains if parsed.domains is not None else environment.get("UNBROKEN_DOMAINS", "")
    return Options(
        num_hosts=num_hosts,
        rank=rank,
        leader=("127.0.0.1", 0) if rank is None else _leader(parsed.leader, environment),
        attempt=f"{environment.get('TORCHELASTIC_RUN_ID', '')}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        name=parsed.name or environment.get("UNBROKEN_POD") or socket.gethostname(),
        domains=tuple(domains.split("/")) if domains else (),
        devices=parsed.devices,
        bad_versions=tuple(_bad_version(text) for text in parsed.bad_version),
        # Pods of one host would share its GPUs, which NCCL refuses.
        backend="gloo" if rank is None and num_hosts > 1 else parsed.backend,
        own_s=parsed.own_timeout,
        arrival_s=parsed.arrival_timeout,
        pair_s=parsed.pair_timeout,
        min_gbits=parsed.min_gbits,
        output=parsed.output,
        is_verbose=parsed.verbose,
        is_idle=is_idle,
    )


def _place(parsed: argparse.Namespace, environment: Mapping[str, str]) -> tuple[int, int | None, bool]:
    """Return the number of hosts, this one's rank, and whether another process speaks for this host."""
    given = (parsed.hosts, parsed.host_rank, parsed.leader)
    if parsed.pods is not None:
        if any(value is not None for value in given):
            raise InputError("--pods: want none of --hosts, --host-rank and --leader with it")
        return parsed.pods, None, False
    if any(value is not None for value in given):
        if parsed.hosts is None or parsed.host_rank is None:
            raise InputError("--hosts, --host-rank: want both of them, got one or none")
        return parsed.hosts, parsed.host_rank, False
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return 1, None, False
    rank, size = _number("RANK", environment), _number("WORLD_SIZE", environment)
    local, local_rank = _number("LOCAL_WORLD_SIZE", environment, 1), _number("LOCAL_RANK", environment, 0)
    host_rank = _number("GROUP_RANK", environment, rank // max(local, 1))
    return _number("GROUP_WORLD_SIZE", environment, size // max(local, 1)), host_rank, local_rank != 0


def _number(name: str, environment: Mapping[str, str], default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{name}: want a number in the environment, got {text!r}")
    return int(text)


def _leader(text: str | None, environment: Mapping[str, str]) -> tuple[str, int]:
    if text is None:
        if not environment.get("MASTER_ADDR") or not environment.get("MASTER_PORT"):
            raise InputError("--leader: want HOST:PORT, or MASTER_ADDR and MASTER_PORT in the environment, got neither")
        return environment["MASTER_ADDR"], _number("MASTER_PORT", environment)
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--leader: want HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def _bad_version(text: str) -> BadVersion:
    name, _, pattern = text.partition("=")
    if name not in NAMES or not pattern:
        raise InputError(f"--bad-version: want NAME=VERSION with NAME of {', '.join(NAMES)}, got {text!r}")
    return BadVersion(name, pattern, "is named by --bad-version")
