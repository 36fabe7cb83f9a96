"""`python -m tests.fuzzing`: sends a great many messages to all who listen, and says what that costs them.

    --messages N    so many in all (1,000,000)
    --seed N        of the first; each target has one of its own
    --targets A,B   only these
    --engine E      seeds, or atheris: inputs that reach new code (`pip install atheris`; not a dependency of ours)

Ends with code 1 at the first defect, when a step takes more than 50 ms of this thread's CPU time, or when memory grew.
It says which message that was, and how to see it again.

A machine that is loaded, or whose host takes its CPUs away, makes any step look slow once, and so does a garbage
collection that happens to fall into it. So a slow step is repeated from where its listener began, and its fastest time
counts; collections are timed by themselves.
"""

import argparse
import gc
import importlib
import resource
import sys
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzzing.operator_target import OperatorTarget
from tests.fuzzing.parsers import ParserTarget
from tests.fuzzing.targets import TARGETS, Target

ALL: dict[str, type[Target]] = {**TARGETS, "operator": OperatorTarget, "parsers": ParserTarget}
SLOW_S = 0.05
MOST_SHOWN = 400
"""Characters of a message that is named."""
_SHARES = {"coordinator": 35, "agent": 25, "rounds": 10, "files": 10, "operator": 5, "parsers": 15}
"""Of all messages, in percent: the operator plans a whole job at each."""
_MAX_GROWTH_KIB = 32 << 10
"""Of the second half of the run: caches fill in the first."""


class ByteSource(Random):
    """A source of randomness that is read from bytes; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        """Whether all bytes were used."""
        return self._at >= len(self._data)

    def getrandbits(self, k: int, /) -> int:
        """Return a number of k bits."""
        num_bytes = (k + 7) // 8
        found = self._data[self._at : self._at + num_bytes].ljust(num_bytes, b"\0")
        self._at += num_bytes
        return int.from_bytes(found, "little") >> (num_bytes * 8 - k)

    def random(self) -> float:
        """Return a number from 0 to 1."""
        return self.getrandbits(16) / 65536


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 10


class Collections:
    """How long the garbage collector took, in CPU time of the thread that it stops; `with` counts."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._started_s = 0.0

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._started_s = time.thread_time()
        else:
            self.longest_s = max(self.longest_s, time.thread_time() - self._started_s)

    def __enter__(self) -> "Collections":
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)


def repeated_s(target: Target, times: int = 5) -> float:
    """Return how long the target's last step takes at least, when all is said again since its listener began."""
    fastest_s = target.took_s
    for _ in range(times):
        if fastest_s <= SLOW_S:
            break
        source = Random()
        source.setstate(target.began)
        again = type(target)(source)
        for _ in range(target.num_steps_since):
            again.step()
        assert again.heard == target.heard, "a listener must depend on nothing but its source"
        fastest_s = min(fastest_s, again.took_s)
    return fastest_s


def run_seeds(kind: type[Target], num_messages: int, seed: int) -> bool:
    """Run one target; return whether all held."""
    name = kind.name
    target = kind(Random(seed))
    slowest_s, num_faked, cpu_s, half_kib = 0.0, 0, 0.0, 0
    again = f"python -m tests.fuzzing --targets {name} --seed {seed} --messages"
    with Collections() as collections:
        for number in range(1, num_messages + 1):
            try:
                target.step()
            except Exception:
                traceback.print_exc()
                print(f"{name}: broken by message {number}, {target.heard[:MOST_SHOWN]!r}; again: {again} {number}")
                return False
            took_s = target.took_s
            if took_s > SLOW_S:
                took_s = repeated_s(target)
                num_faked += took_s <= SLOW_S
            cpu_s += took_s
            if took_s > SLOW_S:
                what = f"{took_s * 1000:.0f} ms for message {number}, {target.heard[:MOST_SHOWN]!r}"
                print(f"{name}: {what}; again: {again} {number}")
                return False
            slowest_s = max(slowest_s, took_s)
            if number == num_messages // 2 + 1:
                half_kib = _resident_kib()
    grown_kib = _resident_kib() - half_kib
    print(
        f"{name}: {num_messages} messages, {target.num_refused} refused, slowest {slowest_s * 1000:.1f} ms, "
        f"{num_faked} slow only once, {cpu_s / num_messages * 1e6:.0f} us each, garbage collection at most "
        f"{collections.longest_s * 1000:.1f} ms, memory +{grown_kib} KiB in the second half",
        flush=True,
    )
    return grown_kib <= _MAX_GROWTH_KIB


def _run_atheris(engine: str, names: list[str], num_messages: int) -> None:
    run: Any = importlib.import_module(engine)
    for module in [name for name in sys.modules if name.startswith("unbroken")]:
        for value in vars(sys.modules[module]).values():
            if callable(value) and getattr(value, "__module__", "") == module and hasattr(value, "__code__"):
                run.instrument_func(value)

    def listen(data: bytes) -> None:
        source = ByteSource(data)
        target = ALL[source.choice(names)](source)
        while not source.is_empty:
            target.step()

    run.Setup([sys.argv[0], f"-runs={num_messages}", "-max_len=4096", "-rss_limit_mb=0"], listen)
    run.Fuzz()


def main(arguments: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(ALL))
    parser.add_argument("--engine", choices=("seeds", "atheris"), default="seeds")
    asked = parser.parse_args(arguments)
    names = asked.targets.split(",")
    if asked.engine != "seeds":
        _run_atheris(asked.engine, names, asked.messages)
        return 0
    started_s = time.monotonic()
    whole = sum(_SHARES[name] for name in names)
    numbers = {name: max(asked.messages * _SHARES[name] // whole, 1) for name in names}
    found = [run_seeds(ALL[name], number, asked.seed) for name, number in numbers.items()]
    print(f"{sum(numbers.values())} messages in {time.monotonic() - started_s:.0f} s")
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
