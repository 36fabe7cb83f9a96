"""Run schedules of the whole control loop; `python -m tests.simulation --control-loop` begins here."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from tests.simulation.control_loop.loop_runner import LoopResult, run_loop_seed

TELL_EVERY_S = 60.0
MAX_SHOWN = 20
MAX_LINE = 600


def tell_loop_seed(seed: int) -> int:
    """Run one seed, and tell its story."""
    result = run_loop_seed(seed)
    print("\n".join(result.story))
    print(result.failure or f"seed {seed}: {result.outcome}")
    return 1 if result.failure else 0


def run_loop_seeds(seeds: Iterable[int]) -> int:
    """Run the seeds and say what came of them; return 1 when any fails, else 0."""
    began_s, told_s = time.process_time(), time.monotonic()
    strikes, outcomes = Counter[str](), Counter[str]()
    num = num_pods = num_recoveries = num_forgot = 0
    failed: list[LoopResult] = []
    for seed in seeds:
        result = run_loop_seed(seed)
        num += 1
        strikes += result.strikes
        outcomes[result.outcome] += 1
        num_pods += result.num_pods
        num_recoveries += result.num_recoveries
        num_forgot += result.num_forgot
        if result.failure:
            failed.append(result)
            print(f"seed {seed}: {result.failure[:MAX_LINE]}", flush=True)
        if time.monotonic() - told_s > TELL_EVERY_S:
            told_s = time.monotonic()
            print(f"... up to seed {seed}: {strikes.total()} strikes, {len(failed)} violations", flush=True)
        if len(failed) >= MAX_SHOWN:
            print(f"ended after {MAX_SHOWN} violations")
            break
    for kind, number in sorted(strikes.items()):
        print(f"{number:9d}  {kind}")
    print(
        f"{num} schedules, {strikes.total()} strikes, {num_pods} pods made, {num_recoveries} recoveries, "
        f"{num_forgot} rendezvous that knew less than the one before, {len(failed)} violations, "
        f"{time.process_time() - began_s:.0f} s of CPU; {dict(outcomes)}"
    )
    return 1 if failed else 0
