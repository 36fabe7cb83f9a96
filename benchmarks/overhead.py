"""What the wrapper costs while nothing fails: one worker of `unbroken run`, which measures itself.

    python benchmarks/overhead.py --rounds 5 --steps 300

- ping: mean of a loop of 100,000 calls, least of five.
- step: 10 ms of plain Python (it holds the GIL all the time, which is the worst case), with a ping after each. What the
  wrapper costs such a step is the ping and the library's threads, which take turns with it; both are measured by
  themselves. "Against plain steps" compares directly: the same steps before the wrapped function is called, in it, and
  after it, in one process; the tenth percentile of the main thread's CPU time, since a busy machine slows many down.
  The row below it compares those before with those after: what is smaller than that is noise of the machine.
- wake-ups: how often the kernel woke the main thread in a sleep, and how often a computing one stopped to stamp.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from unbroken import inprocess
from unbroken_core import stamps

STEP_S = 0.01
PINGS = 100_000
SLEEP_S = 5.0
JOB_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Round:
    """What one process saw."""

    ping_us: float
    ping_step_us: float
    step_percent: float
    """By how much a wrapped step takes longer than a plain one, in CPU time of the main thread."""
    noise_percent: float
    """The same of plain steps against plain ones, without sign."""
    threads_percent: float
    wakeups_per_s: float
    stamps_per_s: float

    @property
    def parts_percent(self) -> float:
        """What one ping and the library's threads take of a step."""
        return self.threads_percent + 100 * self.ping_step_us / 1e6 / STEP_S


ROWS: tuple[tuple[str, Callable[[Round], float], str, float | None], ...] = (
    ("ping(), us", lambda item: item.ping_us, "{:.3f}", 1.0),
    ("ping(step=), us", lambda item: item.ping_step_us, "{:.3f}", 1.0),
    ("CPU of the library's threads, %", lambda item: item.threads_percent, "{:.3f}", None),
    ("step of 10 ms, % slower by ping and threads", lambda item: item.parts_percent, "{:.3f}", 0.1),
    ("  against plain steps, %", lambda item: item.step_percent, "{:+.3f}", None),
    ("  noise: plain against plain, %", lambda item: item.noise_percent, "{:.3f}", None),
    ("wake-ups of a sleeping main thread, 1/s", lambda item: item.wakeups_per_s, "{:.1f}", 10.0),
    ("stamps of a computing main thread, 1/s", lambda item: item.stamps_per_s, "{:.1f}", 10.0),
)
"""Name, value, format and bar (at most) of each row."""


def main() -> int:
    """Run the rounds one after the other and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="of 10 ms each; three times as many a round")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        options.inside.write_text(json.dumps(asdict(measure(options.steps))))
        return 0
    rounds = [_run(options.steps) for _ in range(options.rounds)]
    print(table(rounds))
    return 0


def table(rounds: list[Round]) -> str:
    """Return median, least and most of each row, and the bar."""
    lines = [f"{'':46}{'median':>10}{'min':>10}{'max':>10}{'bar':>10}"]
    for name, read, form, bar in ROWS:
        values = [read(item) for item in rounds]
        cells = [form.format(value) for value in (statistics.median(values), min(values), max(values))]
        cells.append("" if bar is None else f"<= {bar:g}")
        lines.append(f"{name:46}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def _run(steps: int) -> Round:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        script = [__file__, "--steps", str(steps), "--inside", str(result)]
        command = [sys.executable, "-m", "unbroken", "run", "--quiet", "--job", "overhead", *script]
        subprocess.run(command, check=True, timeout=JOB_TIMEOUT_S)
        return Round(**json.loads(result.read_text()))


def measure(steps: int) -> Round:
    """Measure in a worker."""
    turns = _turns_of_a_step()
    found: dict[str, float] = {}

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> None:
        found["ping_us"] = _least_us(call.ping)
        found["ping_step_us"] = _least_us(lambda: call.ping(step=1))
        found["ping_step_us"] -= _least_us(lambda: None)
        began_ns, others_ns = time.monotonic_ns(), _cpu_of_threads_ns()
        found["wrapped_ns"] = _quick_step_ns(turns, steps, lambda step: call.ping(step=step))
        lasted_ns = time.monotonic_ns() - began_ns
        found["threads_percent"] = 100 * (_cpu_of_threads_ns() - others_ns) / lasted_ns
        found["stamps_per_s"] = _stamps_per_s(turns)
        found["wakeups_per_s"] = _wakeups_per_s()

    before_ns = _quick_step_ns(turns, steps, lambda _: None)
    train()
    after_ns = _quick_step_ns(turns, steps, lambda _: None)
    plain_ns = (before_ns + after_ns) / 2
    return Round(
        step_percent=100 * (found.pop("wrapped_ns") / plain_ns - 1),
        noise_percent=100 * abs(before_ns - after_ns) / plain_ns,
        **found,
    )


def _compute(turns: int) -> None:
    number = 0
    for turn in range(turns):
        number += turn & 7


def _turns_of_a_step() -> int:
    turns = 100_000
    least_s = min(_timed_s(turns) for _ in range(20))
    return int(turns * STEP_S / least_s)


def _timed_s(turns: int) -> float:
    began_s = time.thread_time()
    _compute(turns)
    return time.thread_time() - began_s


def _quick_step_ns(turns: int, steps: int, after: Callable[[int], None]) -> float:
    taken = []
    for step in range(steps):
        began_ns = time.thread_time_ns()
        _compute(turns)
        after(step)
        taken.append(time.thread_time_ns() - began_ns)
    return statistics.quantiles(taken, n=10)[0]


def _least_us(call: Callable[[], None]) -> float:
    def once() -> float:
        began_ns = time.thread_time_ns()
        for _ in range(PINGS):
            call()
        return (time.thread_time_ns() - began_ns) / PINGS / 1000

    return min(once() for _ in range(5))


def _other_threads() -> Iterator[Path]:
    return (task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid()))


def _cpu_of_threads_ns() -> int:
    return sum(int((task / "schedstat").read_text().split()[0]) for task in _other_threads())


def _stamps_per_s(turns: int) -> float:
    """Count how often the stamp of the main thread changes while it computes."""
    page = Path(os.environ["UNBROKEN_DIR"]) / "stamps"
    seen = []
    began_s = time.monotonic()
    while time.monotonic() - began_s < SLEEP_S:
        _compute(turns)
        seen.append(stamps.unpack_slot(page.read_bytes(), int(os.environ["UNBROKEN_LOCAL_RANK"])).main_ns)
    return (len(set(seen)) - 1) / SLEEP_S


def _wakeups_per_s() -> float:
    """Count how often the main thread gives up the processor in one long sleep."""
    before = _switches()
    time.sleep(SLEEP_S)
    # The sleep itself ends in one.
    return (_switches() - before - 1) / SLEEP_S


def _switches() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("voluntary")]
    return int(line.split()[1])


if __name__ == "__main__":
    sys.exit(main())
