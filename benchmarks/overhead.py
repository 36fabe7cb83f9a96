"""What the wrapper costs while nothing fails: one worker of `unbroken run`, which measures itself.

    python benchmarks/overhead.py --rounds 5 --steps 1000

- ping: mean of a loop of 100,000 calls, least of five.
- step: 10 ms of plain Python (it holds the GIL all the time, which is the worst case), with a ping after each. The
  direct comparison is with a forked child, in which the library is dead: the same program, in turn with its parent,
  ten steps each, on the same processor. What counts is CPU time of all threads, which a busy machine falsifies least;
  the figure is the median of the pairs, and below it is how far that can be off (standard error of that median).
  "By ping and threads" adds up what the wrapper does to such a step: both are measured by themselves.
- wake-ups: how often the kernel woke the main thread in a sleep, and how often a computing one stopped to stamp.
"""

import argparse
import json
import os
import socket
import statistics
import struct
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
BLOCK = 10
"""Steps of one turn."""
PINGS = 100_000
SLEEP_S = 5.0
JOB_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Round:
    """What one process saw."""

    ping_us: float
    ping_step_us: float
    step_percent: float
    """By how much a wrapped step takes longer than a plain one, in CPU time."""
    error_percent: float
    """Standard error of that."""
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
    ("step of 10 ms, % slower than a plain one", lambda item: item.step_percent, "{:+.3f}", 0.1),
    ("  standard error of that, %", lambda item: item.error_percent, "{:.3f}", None),
    ("wake-ups of a sleeping main thread, 1/s", lambda item: item.wakeups_per_s, "{:.1f}", 10.0),
    ("stamps of a computing main thread, 1/s", lambda item: item.stamps_per_s, "{:.1f}", 10.0),
)
"""Name, value, format and bar (at most) of each row."""


def main() -> int:
    """Run the rounds one after the other and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="of 10 ms each, and as many plain ones, a round")
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
        found.update(_compare(lambda step: _work(turns, step, call.ping), lambda _: _compute(turns), steps))
        lasted_ns = time.monotonic_ns() - began_ns
        found["threads_percent"] = 100 * (_cpu_of_threads_ns() - others_ns) / lasted_ns
        found["stamps_per_s"] = _stamps_per_s(turns)
        found["wakeups_per_s"] = _wakeups_per_s()

    train()
    return Round(**found)


def _compare(wrapped: Callable[[int], None], plain: Callable[[int], None], steps: int) -> dict[str, float]:
    """Run wrapped steps here and plain ones in a forked child, in turn; return percent and its standard error."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        try:
            while there.recv(1):
                there.sendall(struct.pack("q", _block_ns(plain)))
        finally:
            os._exit(0)
    there.close()
    percents = []
    for _ in range(max(steps // BLOCK, 2)):
        wrapped_ns = _block_ns(wrapped)
        here.sendall(b"x")
        (plain_ns,) = struct.unpack("q", here.recv(8))
        percents.append(100 * (wrapped_ns / plain_ns - 1))
    here.close()
    os.waitpid(pid, 0)
    os.sched_setaffinity(0, allowed)
    median = statistics.median(percents)
    spread = statistics.median(abs(percent - median) for percent in percents)
    # For a normal distribution: deviation = 1.48 spreads, and a median is off by 1.25 times what a mean is.
    return {"step_percent": median, "error_percent": 1.25 * 1.48 * spread / len(percents) ** 0.5}


def _block_ns(step: Callable[[int], None]) -> int:
    began_ns = time.process_time_ns()
    for number in range(BLOCK):
        step(number)
    return time.process_time_ns() - began_ns


def _work(turns: int, step: int, ping: Callable[[int], None]) -> None:
    _compute(turns)
    ping(step)


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
