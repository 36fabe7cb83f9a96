"""What a fault costs, and what that makes of weeks on a cluster: measures, simulates, writes tables and picture.

    python benchmarks/cost.py --faults 1        # or `make cost`: all of it, in less than 15 minutes on a quiet machine
    python benchmarks/cost.py --reuse           # simulate again, with the figures of the last time
    python benchmarks/cost.py --only-write      # only the pages, from what is stored

It runs lost_time.py (all systems, all kinds of faults) and feeds what they cost into `unbroken size`, for the sizes,
the rates and the assumptions of cost.yaml. All figures are in docs/cost/cost.json; the tables of docs/cost.md and
README.md and the pictures beside it are made from that file alone.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lost_time import KINDS, SYSTEMS
from reports.cost_feed import MODELS, Cluster, Measured, Settings, read_rows, read_settings, scenario_of
from reports.cost_pages import write_pages
from unbroken_cli.sizing.fields import refuse
from unbroken_cli.sizing.reading import read_scenario
from unbroken_cli.sizing.study import Runs, estimate, run_many, shares
from unbroken_core.vocabulary.errors import InputError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FILE = ROOT / "docs" / "cost" / "cost.json"
OWN = tuple(system for system in SYSTEMS if system.startswith("unbroken"))
MAX_FAULTS = 100


def measure(options: argparse.Namespace, file: Path) -> dict[str, Any]:
    """Run lost_time.py; return the circumstances, its rows are in the file. Raises InputError where it fails."""
    command = [sys.executable, str(HERE / "lost_time.py"), "--faults", str(options.faults), "--json", str(file)]
    command += ["--limit", str(options.limit), *(["--quick"] if options.quick else [])]
    loads, began_s = [os.getloadavg()[0]], time.monotonic()
    done = subprocess.run(command, check=False)
    loads.append(os.getloadavg()[0])
    if not file.exists():
        raise InputError(f"lost_time.py: want rows, got exit code {done.returncode}")
    return {
        "faults": options.faults,
        "quick": options.quick,
        "cpus": os.cpu_count(),
        "load_before": round(loads[0], 1),
        "load_after": round(loads[1], 1),
        "minutes": round((time.monotonic() - began_s) / 60, 1),
    }


def simulate(rows: dict[tuple[str, str], Measured], settings: Settings) -> list[dict[str, Any]]:
    """Return what `unbroken size` says of each system: the same faults for all of one size and rate."""
    found = []
    for name, rate in settings.rates:
        for gpus in settings.sizes:
            for in_background in (False, True):
                found += _simulate_all(rows, settings, name, Cluster(gpus, rate, in_background))
            print(f"simulated {gpus} GPUs with the rates of {name}", file=sys.stderr, flush=True)
    return found


def _simulate_all(
    rows: dict[tuple[str, str], Measured], settings: Settings, rates: str, cluster: Cluster
) -> list[dict[str, Any]]:
    runs: dict[str, Runs] = {}
    for system in SYSTEMS:
        model = MODELS[system]
        if any(rows[system, kind].has_failed for kind in KINDS):
            continue
        value = scenario_of(model, rows, settings, cluster)
        runs[system] = run_many(read_scenario(value), settings.seed, settings.runs)
    # One that writes in memory does so in either case.
    rest = [system for system in runs if not (cluster.in_background and MODELS[system].has_memory)]
    return [
        {
            "rates": rates,
            "gpus": cluster.gpus,
            "system": system,
            "in_background": cluster.in_background,
            **_figures(runs[system], settings),
            "against": {own: _against(runs[own], runs[system]) for own in OWN if own in runs and own != system},
        }
        for system in rest
    ]


def _figures(runs: Runs, settings: Settings) -> dict[str, Any]:
    ettr = estimate(runs.ratio("ettr"))
    scenario = runs.scenario
    hours = scenario.num_gpus * settings.duration_s / 3600
    fastest = min(scenario.tiers, key=lambda tier: tier.every_s)
    restart, total = dict(scenario.restart), sum(fault.rate for fault in scenario.faults)
    means = {"detect_s": 0.0, "restart_s": 0.0}
    for fault in scenario.faults:
        means["detect_s"] += fault.detect.mean_s * fault.rate / total
        means["restart_s"] += sum(restart[rung].mean_s * share for rung, share in fault.rungs) * fault.rate / total
    return {
        "ettr": round(ettr.mean, 5),
        "margin": round(ettr.margin, 5),
        "lost_gpu_hours": round(hours * (1 - ettr.mean)),
        "shares": {term: round(share, 6) for term, share in shares(runs).items()},
        "every_s": round(fastest.every_s, 1),
        "blocking_s": fastest.blocking_s,
        "restore_s": fastest.restore_s,
        **{name: round(value, 2) for name, value in means.items()},
        "spares": scenario.num_spares,
        "interrupted_every_s": round(scenario.mtbf_s),
    }


def _against(own: Runs, other: Runs) -> str:
    """Return how a system does beside one of ours, in runs that meet the same faults."""
    gain = estimate(np.asarray(own.ratio("ettr") - other.ratio("ettr")))
    if abs(gain.mean) <= gain.margin:
        return "same"
    return "behind" if gain.mean > 0 else "ahead"


def make_parser() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", type=int, default=1, help="faults of each system and kind (%(default)s)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a job may take (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model: for tests, not for figures")
    parser.add_argument("--file", type=Path, default=FILE, help="all figures (docs/cost/cost.json)")
    parser.add_argument("--settings", type=Path, default=HERE / "cost.yaml", help="assumptions (benchmarks/cost.yaml)")
    parser.add_argument("--runs", type=int, help="simulated runs (those of the settings)")
    parser.add_argument("--pages", type=Path, default=ROOT, help="checkout whose pages are written (this one)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--rows", type=Path, metavar="FILE", help="take these rows of lost_time.py; measure nothing")
    how.add_argument("--reuse", action="store_true", help="take the rows that are stored; measure nothing")
    how.add_argument("--only-write", action="store_true", help="write the pages from what is stored")
    return parser


def run(options: argparse.Namespace) -> None:
    """Do what is asked. Raises InputError."""
    if not 1 <= options.faults <= MAX_FAULTS:
        refuse("--faults", f"1 to {MAX_FAULTS}", options.faults)
    file = options.file
    if not options.only_write:
        settings = read_settings(yaml.safe_load(options.settings.read_text()))
        if options.runs is not None:
            if not 2 <= options.runs <= 1000:
                refuse("--runs", "2 to 1000", options.runs)
            settings = replace(settings, runs=options.runs)
        stored = _stored(file) if options.reuse else None
        circumstances = stored["measured"] if stored else {"source": "--rows"}
        if stored is not None:
            text = json.dumps(stored["rows"]).encode()
        else:
            rows_file = options.rows or file.with_suffix(".rows")
            if options.rows is None:
                rows_file.parent.mkdir(parents=True, exist_ok=True)
                rows_file.unlink(missing_ok=True)
                circumstances = measure(options, rows_file)
            text = rows_file.read_bytes()
        rows = read_rows(text, str(options.rows or "rows"))
        data = {
            "measured": circumstances,
            "assumptions": [
                dict(zip(("name", "value", "for", "source"), item, strict=True)) for item in settings.words
            ],
            "duration_s": settings.duration_s,
            "runs": settings.runs,
            "rates": dict(settings.rates),
            "rows": json.loads(text),
            "sized": simulate(rows, settings),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(data, indent=1) + "\n")
        file.with_suffix(".rows").unlink(missing_ok=True)
    write_pages(_stored(file), options.pages)


def _stored(file: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"--file {file}: want the figures of a run, got {error}; run `make cost`") from error
    for name in ("measured", "rows", "sized"):
        if not isinstance(data, dict) or name not in data:
            raise InputError(f"--file {file}: {name}: is required; run `make cost`")
    return data


def main(argv: Sequence[str] | None = None) -> int:
    """Do it; return 2 for an input that cannot be meant."""
    try:
        run(make_parser().parse_args(argv))
    except (InputError, OSError) as error:
        print(f"cost.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
