"""What the wrapper costs while nothing fails: one worker of `unbroken run`, which measures itself.

    chrt -r 5 python benchmarks/overhead.py --rounds 3 --seconds 60

- ping: mean of a loop of 100,000 calls, least of five.
- beat: the library runs at two moments only, in a ping and once a second, when a thread of it stamps and asks the main
  thread to do so. Steps of 10 ms of plain Python (they hold the GIL all the time, which is the worst case) are run with
  a ping after each. One with a beat in it is compared with one beside it: CPU time of all threads of the process,
  which a busy machine falsifies least. Shown is the median with its 95 % interval, by bootstrap; "where nothing
  happened" is the same of steps without a beat, and must be 0. Comparing with another process does not do: two equal
  ones differ by a percent, depending on where their memory lies.
- step: what the pings and the beats take of it.
- wake-ups: how often the kernel woke the main thread in a sleep, and how often a computing one stopped to stamp;
  wake-ups of the library's threads show that nothing else runs between two beats.
"""

import argparse
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unbroken import inprocess
from unbroken_core.pod import stamps

STEP_S = 0.01
RESAMPLES = 1000
PINGS = 100_000
SLEEP_S = 5.0
JOB_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Round:
    """What one process saw."""

    ping_us: float
    ping_step_us: float
    beats_us: list[float]
    """By how much a step with a beat in it took longer than one beside it, in CPU time."""
    control_us: list[float]
    """The same of steps without one."""
    beats_per_s: float
    thread_wakeups_per_s: float
    wakeups_per_s: float
    stamps_per_s: float


ROWS: tuple[tuple[str, Callable[[Round], float], str, float | None], ...] = (
    ("ping(), us", lambda item: item.ping_us, "{:.3f}", 1.0),
    ("ping(step=), us", lambda item: item.ping_step_us, "{:.3f}", 1.0),
    ("beats, 1/s", lambda item: item.beats_per_s, "{:.2f}", None),
    ("wake-ups of the library's threads, 1/s", lambda item: item.thread_wakeups_per_s, "{:.2f}", None),
    ("wake-ups of a sleeping main thread, 1/s", lambda item: item.wakeups_per_s, "{:.1f}", 10.0),
    ("stamps of a computing main thread, 1/s", lambda item: item.stamps_per_s, "{:.1f}", 10.0),
)
"""Name, value, format and bar (at most) of each row."""


def main() -> int:
    """Run the rounds one after the other and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of steps of 10 ms, a round (%(default)g)")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        options.inside.write_text(json.dumps(asdict(measure(options.seconds))))
        return 0
    rounds = [_run(options.seconds) for _ in range(options.rounds)]
    print(table(rounds))
    return 0


def table(rounds: list[Round]) -> str:
    """Return median, least and most of each row, and the bar; then what all rounds say of a step."""
    lines = [f"{'':46}{'median':>10}{'min':>10}{'max':>10}{'bar':>10}"]
    for name, read, form, bar in ROWS:
        values = [read(item) for item in rounds]
        cells = [form.format(value) for value in (statistics.median(values), min(values), max(values))]
        cells.append("" if bar is None else f"<= {bar:g}")
        lines.append(f"{name:46}" + "".join(f"{cell:>10}" for cell in cells))
    lines.append(f"{'':46}{'median':>10}{'95 % of it':>20}{'bar':>10}")
    beats = summary([value for item in rounds for value in item.beats_us])
    control = summary([value for item in rounds for value in item.control_us])
    pings = 100 * statistics.median(item.ping_step_us for item in rounds) / 1e6 / STEP_S
    per_s = statistics.median(item.beats_per_s for item in rounds)
    step = tuple(pings + 100 * value / 1e6 * per_s for value in beats)
    lines.append(_line("a beat, us", beats, "{:.0f}", ""))
    lines.append(_line("  the same where nothing happened", control, "{:.0f}", ""))
    lines.append(_line("step of 10 ms, % slower by ping and beats", step, "{:.4f}", "<= 0.1"))
    return "\n".join(lines)


def _line(name: str, values: tuple[float, ...], form: str, bar: str) -> str:
    median, low, high = (form.format(value) for value in values)
    return f"{name:46}{median:>10}{f'{low} to {high}':>20}{bar:>10}"


def summary(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and between what it lies with 95 %, by bootstrap; the same for the same values."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return statistics.median(values), medians[RESAMPLES // 40], medians[-RESAMPLES // 40 - 1]


def _run(seconds: float) -> Round:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        script = [__file__, "--seconds", str(seconds), "--inside", str(result)]
        command = [sys.executable, "-m", "unbroken", "run", "--quiet", "--job", "overhead", *script]
        subprocess.run(command, check=True, timeout=JOB_TIMEOUT_S)
        return Round(**json.loads(result.read_text()))


def measure(seconds: float) -> Round:
    """Measure in a worker."""
    turns = turns_of_a_step()
    found: dict[str, Any] = {}

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> None:
        found["ping_us"] = _least_us(call.ping)
        found["ping_step_us"] = _least_us(lambda: call.ping(step=1))
        found["ping_step_us"] -= _least_us(lambda: None)
        before, began_s = _switches_of_threads(), time.monotonic()
        steps = _run_steps(turns, call.ping, seconds)
        lasted_s = time.monotonic() - began_s
        found["thread_wakeups_per_s"] = (_switches_of_threads() - before) / lasted_s
        found["beats_per_s"] = sum(has_beat for _, has_beat in steps) / lasted_s
        found["beats_us"], found["control_us"] = _beats_and_control(steps)
        found["stamps_per_s"] = _stamps_per_s(turns)
        found["wakeups_per_s"] = _wakeups_per_s()

    train()
    return Round(**found)


def _run_steps(turns: int, ping: Callable[[int], None], seconds: float) -> list[tuple[int, bool]]:
    """Return nanoseconds of CPU time of each step, and whether there was a beat in it."""
    local_rank = int(os.environ["UNBROKEN_LOCAL_RANK"])
    found: list[tuple[int, bool]] = []
    with (Path(os.environ["UNBROKEN_DIR"]) / "stamps").open("rb") as file:
        page = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        stamp_ns, until_s = 0, time.monotonic() + seconds
        while time.monotonic() < until_s:
            began_ns = time.process_time_ns()
            compute(turns)
            ping(len(found))
            took_ns = time.process_time_ns() - began_ns
            former_ns, stamp_ns = stamp_ns, stamps.unpack_slot(page[:], local_rank).alive_ns
            found.append((took_ns, stamp_ns != former_ns))
    return found


def _beats_and_control(steps: list[tuple[int, bool]]) -> tuple[list[float], list[float]]:
    """Return by how many microseconds steps with a beat, and steps without one, are longer than one beside them."""
    beats: list[float] = []
    control: list[float] = []
    for number in range(1, len(steps) - 1):
        took_ns, is_beat = steps[number]
        # One of the two by turns: the mean of both is no fair match, as times are never shorter and sometimes longer.
        beside_ns, was_beat = steps[number + (1 if (len(beats) + len(control)) % 2 else -1)]
        if not was_beat:
            (beats if is_beat else control).append((took_ns - beside_ns) / 1000)
    return beats, control


def compute(turns: int) -> None:
    """Hold a processor, and the GIL."""
    number = 0
    for turn in range(turns):
        number += turn & 7


def turns_of_a_step() -> int:
    """Return with how many turns `compute` takes STEP_S."""
    turns = 100_000
    least_s = min(_timed_s(turns) for _ in range(20))
    return int(turns * STEP_S / least_s)


def _timed_s(turns: int) -> float:
    began_s = time.thread_time()
    compute(turns)
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


def _switches_of_threads() -> int:
    return sum(_switches(task / "status") for task in _other_threads())


def _stamps_per_s(turns: int) -> float:
    """Count how often the stamp of the main thread changes while it computes."""
    page = Path(os.environ["UNBROKEN_DIR"]) / "stamps"
    seen = []
    began_s = time.monotonic()
    while time.monotonic() - began_s < SLEEP_S:
        compute(turns)
        seen.append(stamps.unpack_slot(page.read_bytes(), int(os.environ["UNBROKEN_LOCAL_RANK"])).main_ns)
    return (len(set(seen)) - 1) / SLEEP_S


def _wakeups_per_s() -> float:
    """Count how often the main thread gives up the processor in one long sleep."""
    status = Path("/proc/self/status")
    before = _switches(status)
    time.sleep(SLEEP_S)
    # The sleep itself ends in one.
    return (_switches(status) - before - 1) / SLEEP_S


def _switches(status: Path) -> int:
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("voluntary")]
    return int(line.split()[1])


if __name__ == "__main__":
    sys.exit(main())
