"""`unbroken size`: predicts where the time of a job will go, and how many spares are worth their price."""

import argparse
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unbroken_cli.commands.framework import connect, find_job, run
from unbroken_cli.errors import CommandError
from unbroken_core.vocabulary.errors import InputError

if TYPE_CHECKING:
    from unbroken_cli.sizing.scenario import Scenario
    from unbroken_cli.sizing.spreads import Distribution

_MAX_BYTES = 1 << 20
_MAX_METRICS_BYTES = 32 << 20
_TIMEOUT_S = 20.0
MAX_RUNS = 2000
MAX_FAULTS_IN_ALL = 10_000_000
MAX_STOPS_IN_ALL = 100_000_000
MAX_NODES_IN_ALL = 200_000_000
"""Minutes, each."""
PLANNED_SHARE = 0.1, 0.005
"""Of these faults and nodes, as many take so long where the product's planner says who is promoted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run(parser(), _show, argv)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(
        prog="unbroken size",
        description="Predict where the time of a job will go, and what spares and checkpoints are worth. Reads only.",
    )
    made.add_argument("file", metavar="FILE", type=Path, help="the job and what breaks it, as YAML")
    made.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields", help="such as job.gpus=131072"
    )
    made.add_argument("--runs", type=int, default=50, metavar="N", help="independent runs (%(default)s)")
    made.add_argument("--seed", type=int, default=1, metavar="N", help="the same one, the same faults (%(default)s)")
    made.add_argument(
        "--quick", action="store_true", help="only what is: not what a spare or other intervals would change"
    )
    source = made.add_mutually_exclusive_group()
    source.add_argument("--from-job", metavar="JOB", help="take the costs of recoveries from this job's metrics")
    source.add_argument("--from-metrics", metavar="FILE|URL", help="... or from the text of metrics")
    places = made.add_mutually_exclusive_group()
    places.add_argument("-n", "--namespace", help="namespace of the job (that of the kubeconfig's context)")
    places.add_argument("-A", "--all-namespaces", action="store_true", help="look in all namespaces")
    made.add_argument("--kubeconfig", metavar="FILE", help="($KUBECONFIG, else ~/.kube/config)")
    made.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    made.add_argument("--html", type=Path, metavar="FILE", help="write it as a page with pictures, too")
    made.add_argument("-o", "--output", choices=("text", "json"), default="text", help="(%(default)s)")
    return made


def _show(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    # One run says nothing of how far its mean may be off.
    for name, value, low, high in (("--runs", arguments.runs, 2, MAX_RUNS), ("--seed", arguments.seed, 1, 2**31)):
        if not low <= value <= high:
            raise InputError(f"{name}: want {low} to {high}, got {value}")
    try:
        from unbroken_cli.sizing.reading import read_scenario  # noqa: PLC0415 - other commands need no numpy
        from unbroken_cli.sizing.report import answer_lines, answer_page  # noqa: PLC0415 - needs numpy, too
        from unbroken_cli.sizing.study import answer  # noqa: PLC0415 - needs numpy, too
    except ImportError as error:
        raise InputError(f"the package {error.name} is missing: pip install 'unbroken[size]'") from error
    value = _read_yaml(arguments.file)
    for assignment in arguments.fields:
        _assign(value, assignment)
    measured, notes = _measured(arguments)
    scenario = read_scenario(value, measured)
    _check_runs(scenario, arguments.runs)
    looks = min(arguments.runs, max(10, arguments.runs // 5))
    found = answer(scenario, arguments.seed, arguments.runs, looks=looks, notes=notes, quick=arguments.quick)
    lines = answer_lines(found)
    if arguments.html is not None:
        try:
            arguments.html.write_text(answer_page(found), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--html {arguments.html}: {error.strerror}; choose a file that can be written") from error
        lines.append(f"  wrote {arguments.html}")
    return lines, asdict(found)


def _check_runs(scenario: "Scenario", runs: int) -> None:
    """Raise InputError for what would take hours."""
    within = scenario.stays_within
    faults, nodes = PLANNED_SHARE if within else (1.0, 1.0)
    where = f" where spares stay within their {within}" if within else ""
    for what, limit, each in (
        (f"faults in all runs{where}", MAX_FAULTS_IN_ALL * faults, scenario.expected_faults),
        (f"nodes in all runs{where}", MAX_NODES_IN_ALL * nodes, scenario.total_nodes),
        ("checkpoints in all runs of all kinds but the most frequent", MAX_STOPS_IN_ALL, scenario.expected_stops),
    ):
        if each * runs > limit:
            raise InputError(
                f"--runs: want at most {limit:.0f} {what}, got {each * runs:.0f}: {each:.0f} in each of {runs}"
            )


def _read_yaml(file: Path) -> Any:
    try:
        import yaml  # noqa: PLC0415 - other commands need none

        from unbroken_cli.sizing.plain_yaml import read_yaml  # noqa: PLC0415 - needs it
    except ImportError as error:
        raise InputError("the package PyYAML is missing: pip install 'unbroken[size]'") from error
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"FILE {file}: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise InputError(f"FILE {file}: want at most {_MAX_BYTES} bytes")
    try:
        return read_yaml(data.decode())
    except InputError as error:
        raise InputError(f"FILE {file}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"FILE {file}: not YAML: {' '.join(str(error).split())[:200]}") from error


def _assign(value: Any, assignment: str) -> None:
    """Set one field of the input: `faults[0].rate=3`, `spares.shared=16`."""
    import yaml  # noqa: PLC0415 - it was there for the file

    from unbroken_cli.sizing.plain_yaml import read_yaml  # noqa: PLC0415 - needs it

    path, equals, text = assignment.partition("=")
    keys = path.replace("[", ".").replace("]", "").split(".")
    if not equals or not all(keys):
        raise InputError(f"--set: want FIELD=VALUE such as job.gpus=131072, got {assignment[:80]!r}")
    place = value
    for number, key in enumerate(keys):
        is_last = number == len(keys) - 1
        if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
            index: Any = int(key)
        elif isinstance(place, dict):
            index = key
        else:
            raise InputError(f"--set {path[:80]}: the input has no such field")
        if is_last:
            try:
                place[index] = read_yaml(text)
            except InputError as error:
                raise InputError(f"--set {path[:80]}: {error}") from error
            except (yaml.YAMLError, ValueError, RecursionError) as error:
                raise InputError(f"--set {path[:80]}: not a value: {text[:80]!r}") from error
        else:
            place = place.setdefault(index, {}) if isinstance(place, dict) else place[index]


def _measured(arguments: argparse.Namespace) -> "tuple[Mapping[str, Distribution] | None, list[str]]":
    """Return what recoveries cost, by phase, and notes; None where nobody asks for it."""
    from unbroken_cli.sizing.measured import measured_spreads  # noqa: PLC0415 - needs numpy

    if arguments.from_job is not None:
        cluster = connect(arguments)
        arguments.job = arguments.from_job
        metadata = find_job(cluster, arguments)["metadata"]
        text = cluster.service_text(metadata["namespace"], f"{metadata['name']}-rendezvous", "metrics", "metrics")
        return measured_spreads(text, f"--from-job {arguments.from_job}")
    if arguments.from_metrics is not None:
        return measured_spreads(_metrics_text(arguments.from_metrics), f"--from-metrics {arguments.from_metrics}")
    return None, []


def _metrics_text(source: str) -> str:
    try:
        if source.startswith(("http://", "https://")):
            with urllib.request.urlopen(source, timeout=_TIMEOUT_S) as response:
                data: bytes = response.read(_MAX_METRICS_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(_MAX_METRICS_BYTES + 1)
    except (OSError, ValueError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise CommandError(f"--from-metrics {source}: {reason}") from error
    if len(data) > _MAX_METRICS_BYTES:
        # What is cut off may be buckets, and the histogram another one without them.
        raise InputError(f"--from-metrics {source}: want at most {_MAX_METRICS_BYTES} bytes")
    return data.decode(errors="replace")
