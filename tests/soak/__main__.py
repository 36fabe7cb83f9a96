"""Break real jobs at random: python -m tests.soak [--seeds 0:20]. The exit code is 1 when any went wrong."""

import argparse
import sys

from tests.soak.run import Outcome, soak


def main() -> int:
    """Run the seeds one after the other, a line each."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Random real faults against real jobs.")
    parser.add_argument("--seeds", default="0:20", help="first:last, the last excluded (default 0:20)")
    first, last = map(int, parser.parse_args().seeds.split(":"))
    outcomes = []
    for seed in range(first, last):
        outcomes.append(soak(seed))
        print(_line(outcomes[-1]), flush=True)
    num_failed = sum(bool(outcome.violations) for outcome in outcomes)
    num_faults = sum(len(outcome.faults) for outcome in outcomes)
    num_recoveries = sum(outcome.num_recoveries for outcome in outcomes)
    num_given_up = sum(outcome.has_given_up for outcome in outcomes)
    print(
        f"{len(outcomes)} jobs, {num_faults} faults, {num_recoveries} recoveries, "
        f"{num_given_up} jobs given up, {num_failed} went wrong"
    )
    return 1 if num_failed else 0


def _line(outcome: Outcome) -> str:
    pods, spares, ranks_per_pod = outcome.shape
    what = f"{pods}+{spares} pods x {ranks_per_pod}, {len(outcome.faults)} faults, {outcome.num_recoveries} recoveries"
    well = "ok, given up and said so" if outcome.has_given_up else "ok"
    verdict = "; ".join([*outcome.violations, f"see {outcome.folder}"]) if outcome.violations else well
    return f"seed {outcome.seed}: {what}, {outcome.seconds:.0f} s: {verdict}"


if __name__ == "__main__":
    sys.exit(main())
