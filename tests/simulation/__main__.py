"""Run random fault schedules: python -m tests.simulation [--control-loop] [--seeds 0:1000] [--seed 17]."""

import argparse
import sys
import time
from pathlib import Path

from tests.simulation.action_log import write_log
from tests.simulation.control_loop.loop_report import run_loop_seeds, tell_loop_seed
from tests.simulation.runner import run_seed


def main() -> int:
    """Run the seeds; the exit code is 1 when any of them fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Random faults in virtual time.")
    parser.add_argument("--seeds", default="0:1000", help="first:last, the last excluded (default 0:1000)")
    parser.add_argument("--seed", type=int, help="run only this one, and tell its story")
    parser.add_argument("--log-actions", type=Path, help="write digests of what the coordinator does (action_log.py)")
    parser.add_argument("--control-loop", action="store_true", help="with cluster, API server and operators")
    options = parser.parse_args()
    if options.control_loop and options.seed is not None:
        return tell_loop_seed(options.seed)
    if options.control_loop:
        return run_loop_seeds(range(*map(int, options.seeds.split(":"))))
    if options.seed is not None:
        result = run_seed(options.seed)
        print("\n".join(result.story))
        print(result.failure or f"seed {options.seed}: {result.outcome}")
        return 1 if result.failure else 0
    first, last = map(int, options.seeds.split(":"))
    if options.log_actions is not None:
        write_log(options.log_actions, range(first, last))
        return 0
    started_s = time.perf_counter()
    results = [run_seed(seed) for seed in range(first, last)]
    failed = [result for result in results if result.failure]
    for result in failed[:10]:
        print(f"seed {result.seed}: {result.failure}")
    outcomes: dict[str, int] = {}
    for result in results:
        outcomes[result.outcome] = outcomes.get(result.outcome, 0) + 1
    num_faults = sum(result.num_faults for result in results)
    num_recoveries = sum(result.num_recoveries for result in results)
    num_common = sum(result.num_common for result in results)
    num_growths = sum(result.num_growths for result in results)
    num_restored = sum(result.num_restored for result in results)
    num_again = sum(result.num_chosen_again for result in results)
    seconds = time.perf_counter() - started_s
    print(
        f"{len(results)} schedules, {num_faults} faults, {num_recoveries} recoveries, "
        f"{num_common} moves after a common step ({num_growths} to grow), "
        f"{num_restored} restores from memory ({num_again} not of the first choice), "
        f"{len(failed)} violations, {seconds:.1f} s; {outcomes}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
