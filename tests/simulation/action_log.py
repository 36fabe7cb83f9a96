"""What the coordinator did in each schedule, to compare two versions of its code: they shall do the same.

    python -m tests.simulation --seeds 0:5000 --log-actions before.txt
    python -m tests.simulation.action_log before.txt after.txt

One line a schedule: seed, outcome, number of steps, and two digests: one of all actions with their times, one of what
the status said. Messages are written as values in the order of their fields, without names: names may change.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from tests.simulation.schedule import make_schedule
from tests.simulation.world import World

from unbroken_core.coordinator.events import Event, Tick


def logged_run(seed: int) -> tuple[str, list[str], list[str]]:
    """Run one schedule. Return how it went, and the lines of its actions and of its statuses."""
    world = _LoggedWorld(seed)
    try:
        world.run()
        outcome = "down" if world.coordinator is None else world.coordinator.phase.value
    except Exception as error:
        outcome = f"{type(error).__name__}:{error}"
    return outcome, world.actions, world.statuses


def write_log(path: Path, seeds: Iterable[int], in_full: bool = False) -> None:
    """Write the digests of these schedules; in full, all that was done, too."""
    with path.open("w") as file:
        for seed in seeds:
            outcome, actions, statuses = logged_run(seed)
            digests = [hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for lines in (actions, statuses)]
            file.write(f"{seed} {len(actions)} {digests[0]} {digests[1]} {outcome!r}\n")
            if in_full:
                file.writelines(f"    {line}\n" for line in (*actions, *statuses))
            file.flush()


class _LoggedWorld(World):
    """A world that writes down what its coordinators do."""

    def __init__(self, seed: int) -> None:
        self.actions: list[str] = []
        self.statuses: list[str] = []
        super().__init__(make_schedule(seed))

    def step(self, event: Event) -> None:
        coordinator = self.coordinator
        if coordinator is None:
            return
        revision = coordinator.revision
        # What is sent and closed follows; a tick that nothing comes of may be saved without any harm.
        where = len(self.actions)
        kind = type(event).__name__
        super().step(event)
        if self.coordinator is not coordinator:
            return
        if len(self.actions) > where or not isinstance(event, Tick):
            self.actions.insert(where, f"{self.now_s!r} {kind}")
        if coordinator.revision != revision:
            self.statuses.append(f"{self.now_s!r} {plain(coordinator.status(self.now_s, str))!r}")

    def to_agent(self, name: str, message: Any) -> None:
        self.actions.append(f"  {name} {plain(message)!r}")
        super().to_agent(name, message)

    def break_connection(self, name: str) -> None:
        self.actions.append(f"  {name} closed")
        super().break_connection(name)


def plain(value: Any) -> Any:
    """Return a message as nested tuples of JSON values, without names."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return tuple((plain(key), plain(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    if is_dataclass(value):
        read = _values(value.__class__)
        return tuple(map(plain, read(value)))
    raise TypeError(f"want a message, got {type(value).__name__}")


@cache
def _values(kind: type[Any]) -> Callable[[Any], Iterable[Any]]:
    names = [field.name for field in fields(kind)]
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


def differences(before: Path, after: Path) -> Iterator[str]:
    """Yield one line for each schedule that went differently."""
    logs = [
        dict(line.split(" ", 1) for line in path.read_text().splitlines() if line[0] != " ") for path in (before, after)
    ]
    for seed in sorted(logs[0].keys() & logs[1].keys(), key=int):
        if logs[0][seed] != logs[1][seed]:
            yield f"seed {seed}: {logs[0][seed]} -> {logs[1][seed]}"


if __name__ == "__main__":
    FOUND = list(differences(*map(Path, sys.argv[1:3])))
    print("\n".join([*FOUND[:20], f"{len(FOUND)} schedules differ"]))
    sys.exit(1 if FOUND else 0)
