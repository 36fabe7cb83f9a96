"""Options of `unbroken run`, and the job that they describe."""

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from unbroken.run.json_lists import read_json_list
from unbroken.run.log_rules import read_log_rules
from unbroken.run.memory_folder import read_size
from unbroken.watch.checks.probe import MAX_PROBES, probes_of
from unbroken_core.protocol.settings import (
    DEFAULT_RUNGS,
    USUAL_PREFLIGHT_S,
    HealthMode,
    JobSettings,
    RungBudget,
    StragglerMode,
    Timeouts,
)
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Rung

MAX_LOCAL_PODS = 250
STDIN = "-"
"""In the place of a script: it is read from standard input."""
_EPILOG = """
examples:
  unbroken run --pods 4 --spares 1 --ranks-per-pod 2 train.py --epochs 3
  unbroken run --pods 2 --ranks-per-pod 2 --rungs process,pod torchrun_style_script.py
  unbroken run --pods 4 --layers rack --domains r1,r1,r2,r2,r2 --spares 1 train.py

A script that calls unbroken.inprocess.Wrapper is restarted in its process. For any other script, as written for
torchrun, leave the rung in-process out: every fault then restarts the processes.
"""


@dataclass(frozen=True)
class RunOptions:
    """What to run, and how."""

    settings: JobSettings
    command: tuple[str, ...]
    domains: tuple[tuple[str, ...], ...]
    """Names of each pod's domains, outermost first, active pods before spares."""
    log_dir: Path | None
    max_replacements: int
    """How many pods may be replaced; after that the run gives up as soon as too few are left."""
    is_quiet: bool
    is_encrypted: bool
    """Whether agents and rendezvous speak TLS."""
    memory_bytes: int | None = None
    """How much checkpoints in memory may take in each pod; None: there are none."""
    allows_faults: bool = False
    """Whether pods take orders of `unbroken inject` to break themselves."""
    variables: tuple[tuple[str, str], ...] = ()
    """More of the workers' environment."""
    work_folder: Path | None = None
    """In which workers begin; None: the present one."""
    probes: str = ""
    """Commands with which the watches look at more, as the watch reads them; "" for none."""
    max_faults: int | None = None
    """With more than this the run is given up; None: only as the job's settings say."""


def read_options(arguments: Sequence[str] | None) -> RunOptions:
    """Read the command line. Raises InputError that says what, where, seen, wanted; SystemExit for --help."""
    return options_of(make_parser().parse_args(arguments))


def options_of(parsed: argparse.Namespace) -> RunOptions:
    """Return what a command line says. Raises InputError likewise."""
    command = _command(parsed.command if parsed.module is None else ["-m", *parsed.module])
    layers = tuple(Layer(name, f"local/{name}") for name in _names("--layers", parsed.layers))
    num_pods = parsed.pods + parsed.spares
    if num_pods > MAX_LOCAL_PODS:
        raise InputError(f"--pods, --spares: want at most {MAX_LOCAL_PODS} pods on one machine, got {num_pods}")
    settings = JobSettings(
        job=_job_name(parsed.job, command),
        uid=f"local-{os.getpid()}",
        replicas=parsed.pods,
        min_replicas=parsed.min_pods,
        spares=parsed.spares,
        ranks_per_pod=parsed.ranks_per_pod,
        layers=layers,
        divisible_by=parsed.divisible_by,
        max_ranks=parsed.max_ranks,
        min_ranks_per_pod=parsed.min_ranks_per_pod,
        rungs=_rungs(parsed.rungs),
        max_faults_per_rank=parsed.max_faults_per_rank,
        no_progress_limit=parsed.no_progress_limit,
        grow_back_s=parsed.grow_back,
        timeouts=_timeouts(parsed),
        copies=_copies(parsed),
        across=parsed.memory_across,
        health=HealthMode(parsed.health),
        stragglers=StragglerMode(parsed.stragglers),
        straggler_window_s=parsed.straggler_window,
        pipeline_stages=parsed.pipeline_stages,
        preflight=HealthMode(parsed.preflight),
        preflight_s=parsed.preflight_timeout,
        preflight_pairs=parsed.preflight_pairs,
        log_rules=() if parsed.log_rules is None else read_log_rules(parsed.log_rules),
    )
    return RunOptions(
        settings=settings,
        command=command,
        domains=_domains(parsed.domains, layers, num_pods),
        log_dir=Path(parsed.log_dir).absolute() if parsed.log_dir else None,
        max_replacements=parsed.max_replacements,
        is_quiet=parsed.quiet,
        is_encrypted=_is_encrypted(parsed.tls),
        memory_bytes=read_size("--memory", parsed.memory) if parsed.memory else None,
        allows_faults=parsed.allow_faults,
        probes=_probes(parsed),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; `{self.prog} --help` lists all options")


def make_parser(
    prog: str = "unbroken run",
    description: str = "Run a training script on this machine as a job that survives faults.",
    epilog: str = _EPILOG,
) -> argparse.ArgumentParser:
    """Return the parser of the command line, of `unbroken run` or of another command that takes its options."""
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in (_add_shape, _add_recovery, _add_times, _add_health, _add_other):
        add(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ...", help="run this module")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="script.py ...",
        help="script or command, with arguments; -: a script on standard input, without the modules beside it",
    )
    return parser


def _add_shape(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_argument_group("shape of the job")
    shape.add_argument("--pods", type=int, default=1, metavar="N", help="active pods (1)")
    shape.add_argument("--min-pods", type=int, metavar="N", help="go on with as few as this (default: all)")
    shape.add_argument("--spares", type=int, default=0, metavar="N", help="pods that wait, ready to take over (0)")
    shape.add_argument(
        "--ranks-per-pod",
        "--nproc-per-node",
        "--nproc_per_node",
        type=int,
        default=1,
        metavar="N",
        help="worker processes a pod (1)",
    )
    shape.add_argument("--divisible-by", type=int, default=1, metavar="N", help="world size is a multiple of this")
    shape.add_argument("--max-ranks", type=int, metavar="N", help="largest world size")
    shape.add_argument(
        "--min-ranks-per-pod", type=int, metavar="N", help="a pod with fewer healthy workers is left out"
    )
    shape.add_argument("--layers", default="", metavar="A,B", help="topology layers, outermost first: rack,host")
    shape.add_argument(
        "--domains", default="", metavar="A/B,...", help="domains of each pod, one name a layer: r1/h1,r1/h2"
    )


def _add_recovery(parser: argparse.ArgumentParser) -> None:
    recovery = parser.add_argument_group("recovery")
    recovery.add_argument(
        "--rungs",
        default="",
        metavar="R,...",
        help="ladder, each rung as NAME, NAME:LIMIT or NAME:LIMIT/SECONDS (in-process,process,pod,world,job)",
    )
    recovery.add_argument(
        "--max-faults-per-rank",
        type=int,
        metavar="N",
        help="a worker with more faults than this gets no rank (no limit)",
    )
    recovery.add_argument(
        "--no-progress-limit",
        type=int,
        metavar="N",
        help="give up after more faults in a row than this without a new step, or 60 s of training if the script "
        "reports no steps (10 of the same fault, 30 with others between, 100 of any)",
    )
    recovery.add_argument("--max-replacements", type=int, default=16, metavar="N", help="pods replaced at most (16)")
    recovery.add_argument(
        "--grow-back", type=float, metavar="S", help="take in pods that have been ready for missing ranks this long"
    )


def _add_times(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("time limits in seconds")
    times.add_argument("--soft-timeout", type=float, metavar="S", help="no progress: interrupt (60)")
    times.add_argument("--hard-timeout", type=float, metavar="S", help="no progress: end the process (1.5 x soft)")
    times.add_argument("--barrier-timeout", type=float, metavar="S", help="everyone ready after an interruption")
    for name, default in _OTHER_TIMEOUTS.items():
        times.add_argument(f"--{name}", type=float, default=default, metavar="S", help=f"({default:g})")


def _probes(parsed: argparse.Namespace) -> str:
    if parsed.probes is None:
        return ""
    if parsed.health == HealthMode.OFF.value:
        raise InputError("--probes: nothing runs them with --health Off; want --health Observe or Act")
    data = read_json_list("--probes", parsed.probes, "probes", MAX_PROBES)
    # As it was written: what JSON writes with escapes may have six times as much, and a variable has an end.
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) if probes_of(data, "--probes") else ""


def _add_health(parser: argparse.ArgumentParser) -> None:
    health = parser.add_argument_group("health")
    health.add_argument(
        "--health",
        choices=[mode.value for mode in HealthMode],
        default=HealthMode.OFF.value,
        help="watch devices and links: Observe reports, Act moves ranks (Off)",
    )
    health.add_argument(
        "--probes", metavar="JSON", help="commands that look at more: a list as in spec.health.probes, or its file"
    )
    health.add_argument(
        "--stragglers",
        choices=[mode.value for mode in StragglerMode],
        default=StragglerMode.OFF.value,
        help="find ranks that hold all others up: Report names them, Move moves them to a spare (Off)",
    )
    health.add_argument(
        "--straggler-window", type=float, default=60.0, metavar="S", help="seconds over which ranks are compared (60)"
    )
    health.add_argument(
        "--pipeline-stages", type=int, default=1, metavar="N", help="compare them within their pipeline stage (1)"
    )
    health.add_argument(
        "--preflight",
        choices=[mode.value for mode in HealthMode],
        default=HealthMode.OFF.value,
        help="let each pod test itself before its first process: Observe tells, Act passes over who is broken (Off)",
    )
    health.add_argument(
        "--preflight-timeout",
        type=float,
        default=float(USUAL_PREFLIGHT_S),
        metavar="S",
        help=f"for so many seconds at most ({USUAL_PREFLIGHT_S})",
    )
    health.add_argument(
        "--preflight-pairs", action="store_true", help="and then with other pods, while it has no ranks"
    )
    health.add_argument(
        "--log-rules", metavar="JSON", help="what workers' lines mean: a list as in spec.health.logRules, or its file"
    )


def _add_other(parser: argparse.ArgumentParser) -> None:
    other = parser.add_argument_group("other")
    other.add_argument("--job", default="", metavar="NAME", help="name of the job (default: the script's)")
    other.add_argument("--log-dir", metavar="DIR", help="keep DIR/<pod>/rank-<local>/<incarnation>.log")
    other.add_argument(
        "--memory", metavar="SIZE", help="keep checkpoints in memory (unbroken.memory), at most SIZE a pod: 2Gi"
    )
    other.add_argument(
        "--memory-replicas",
        type=int,
        default=0,
        metavar="N",
        help="copy them to N other pods; a pod's memory is then its own, and lost with it (0)",
    )
    other.add_argument(
        "--memory-across", default="", metavar="LAYER", help="copies lie in different domains of it (the outermost)"
    )
    other.add_argument("--tls", action="store_true", help="encrypt what agents and rendezvous say to each other")
    other.add_argument(
        "--allow-faults",
        action="store_true",
        help="let `unbroken inject` break workers from inside, too (docs/faults.md)",
    )
    other.add_argument(
        "--quiet", action="store_true", help="say only faults, recoveries and the end after them, or why the job failed"
    )


_DEFAULT = Timeouts()
_OTHER_TIMEOUTS = {
    "heartbeat-timeout": _DEFAULT.heartbeat_s,
    "completion-timeout": _DEFAULT.completion_s,
    "startup-timeout": _DEFAULT.startup_s,
    "reconnect-timeout": _DEFAULT.reconnect_s,
    "termination-grace": _DEFAULT.termination_grace_s,
    "last-call": _DEFAULT.last_call_s,
    "drain-timeout": _DEFAULT.drain_s,
}


def _timeouts(parsed: argparse.Namespace) -> Timeouts:
    soft_s = _DEFAULT.soft_s if parsed.soft_timeout is None else parsed.soft_timeout
    hard_s = 1.5 * soft_s if parsed.hard_timeout is None else parsed.hard_timeout
    barrier_s = max(_DEFAULT.barrier_s, 2 * hard_s) if parsed.barrier_timeout is None else parsed.barrier_timeout
    return Timeouts(
        soft_s=soft_s,
        hard_s=hard_s,
        barrier_s=barrier_s,
        heartbeat_s=parsed.heartbeat_timeout,
        completion_s=parsed.completion_timeout,
        startup_s=parsed.startup_timeout,
        reconnect_s=parsed.reconnect_timeout,
        termination_grace_s=parsed.termination_grace,
        last_call_s=parsed.last_call,
        drain_s=parsed.drain_timeout,
    )


def _copies(parsed: argparse.Namespace) -> int:
    for option, is_given in (
        ("--memory-replicas", parsed.memory_replicas != 0),
        ("--memory-across", bool(parsed.memory_across)),
    ):
        if is_given and not parsed.memory:
            raise InputError(f"{option}: want --memory SIZE as well, got no size")
    if parsed.memory_across and not parsed.memory_replicas:
        raise InputError("--memory-across: want --memory-replicas N as well, got no copies")
    others = parsed.pods + parsed.spares - 1
    if parsed.memory_replicas > others:
        raise InputError(f"--memory-replicas: want at most {others}, the other pods, got {parsed.memory_replicas}")
    return int(parsed.memory_replicas)


def _rungs(text: str) -> tuple[RungBudget, ...]:
    if not text:
        return DEFAULT_RUNGS
    return tuple(_rung(part) for part in _names("--rungs", text))


def _rung(text: str) -> RungBudget:
    match = re.fullmatch(r"([a-z-]+)(?::(\d+)(?:/(\d+(?:\.\d+)?))?)?", text)
    words = [rung.value for rung in Rung]
    if match is None or match[1] not in words:
        raise InputError(f"--rungs: want NAME, NAME:LIMIT or NAME:LIMIT/SECONDS with NAME of {words}, got {text!r}")
    limit = None if match[2] is None else int(match[2])
    return RungBudget(Rung(match[1]), limit) if match[3] is None else RungBudget(Rung(match[1]), limit, float(match[3]))


def _names(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text else []
    if any(not name for name in names):
        raise InputError(f"{option}: want names with commas between them, got {text!r}")
    return names


def _domains(text: str, layers: tuple[Layer, ...], num_pods: int) -> tuple[tuple[str, ...], ...]:
    """Return the domains of each pod; by default one domain per pod in the innermost layer, and one in each other."""
    if not text:
        outer = tuple(f"{layer.name}-0" for layer in layers[:-1])
        return tuple((*outer, f"{layers[-1].name}-{pod}") if layers else () for pod in range(num_pods))
    if not layers:
        raise InputError(f"--domains: want --layers with the names of the layers, got only --domains {text}")
    found = tuple(tuple(path.split("/")) for path in _names("--domains", text))
    if len(found) != num_pods:
        raise InputError(f"--domains: want one for each of {counted(num_pods, 'pod')} (spares last), got {len(found)}")
    for path in found:
        if len(path) != len(layers) or not all(path):
            names = "/".join(layer.name.upper() for layer in layers)
            raise InputError(f"--domains: want {names} for each pod, got {'/'.join(path)!r}")
    return found


def _is_encrypted(is_wanted: bool) -> bool:
    if is_wanted and importlib.util.find_spec("trustme") is None:
        raise InputError("--tls needs the package trustme: pip install 'unbroken[tls]'")
    return is_wanted


def _command(words: list[str]) -> tuple[str, ...]:
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise InputError("script: want `unbroken run [options] script.py [arguments]`, got no script")
    first = words[0]
    if first == STDIN:
        return (sys.executable, *words)
    if first.startswith("-") and first != "-m":
        raise InputError(f"unknown option {first}; `unbroken run --help` lists all")
    if first == "-m":
        if len(words) == 1:
            raise InputError("-m: want the name of a module, got nothing")
        return (sys.executable, *words)
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise InputError(f"script: {first!r} does not exist")
        return (sys.executable, *words)
    if shutil.which(first) is None:
        raise InputError(f"script: want a .py file or a command that is in PATH, got {first!r}")
    return tuple(words)


def _job_name(text: str, command: tuple[str, ...]) -> str:
    """Return a valid name of a Kubernetes object, as pods are named after it."""
    if not text:
        words = command[1:] if command[0] == sys.executable and len(command) > 1 else command
        source = words[1] if words[0] == "-m" else Path(words[0]).stem
        text = re.sub(r"[^a-z0-9-]+", "-", source.lower()).strip("-")[:40].strip("-") or "job"
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", text):
        raise InputError(f"--job: want lower-case letters, digits and dashes, at most 52, got {text!r}")
    return text
