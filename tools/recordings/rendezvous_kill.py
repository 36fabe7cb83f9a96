"""Kill a worker, and in the middle of the recovery the rendezvous, and show that the training goes on.

`make rendezvous-kill`; PYTHONPATH=. python -m tools.recordings.rendezvous_kill [--svg FILE]. The job is real:
`unbroken run`, three pods of a worker and a spare, torch over gloo. Exit code 0 when every step was applied exactly
once, and all workers but the killed one trained in the same process from the first step to the last.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tools.recordings.local_job import LIMIT_S, LocalJob, RecordingError, local_job

SCRIPT = Path(__file__).with_name("rendezvous_kill_job.py")
OPTIONS = ("--job", "demo", "--pods", "3", "--spares", "1")
VICTIM = 1
"""Rank whose worker is killed."""
NUM_STEPS = 24
KILL_AT_STEP = 5
_PATIENCE_S = 30.0


@dataclass
class Story:
    """What happened, as it is reported."""

    console: Console
    started_s: float = field(default_factory=time.monotonic)

    def tell(self, who: str, text: str, style: str = "") -> None:
        """Print a line."""
        at = f"{time.monotonic() - self.started_s:6.2f} s  "
        self.console.print(Text.assemble((at, "dim"), (f"{who:<12}", "bold"), (text, style)), soft_wrap=True)


class Watched:
    """The job's status, as each rendezvous tells it."""

    def __init__(self, job: LocalJob, url: str) -> None:
        self.job = job
        self.url = url
        self.last: dict[str, Any] = {"term": -1, "revision": -1}

    def until(self, what: str, *phases: str) -> dict[str, Any]:
        """Wait for one of these phases, each change told at once. Raises RecordingError."""
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            query = f"?term={self.last['term']}&after={self.last['revision']}&timeout=5"
            status = self.job.status(self.url, query)
            if status is None:
                time.sleep(0.02)
                continue
            self.last = status
            if status["phase"] in phases:
                return status
        raise RecordingError(f"want {what} within {_PATIENCE_S:g} s\n{self.job.output()}")


def lines(place: Path, name: str) -> list[str]:
    """Return what the workers have written."""
    file = place / name
    return file.read_text().splitlines() if file.exists() else []


def pids(place: Path) -> dict[int, list[int]]:
    """Return the processes of each rank, in the order in which they had it."""
    found: dict[int, list[int]] = {}
    for line in lines(place, "pids"):
        rank, pid = map(int, line.split())
        found.setdefault(rank, []).append(pid)
    return found


def break_it(job: LocalJob, place: Path, story: Story) -> None:
    """Kill a worker, and the rendezvous before the recovery is over. Raises RecordingError where it was too late."""
    watched = Watched(job, job.url)
    status = watched.until("a job that trains", "running")
    story.tell("rendezvous", f"{status['message']}, {status['spare_ranks']} spare", "green")
    job.until(lambda: len(lines(place, "applied")) >= KILL_AT_STEP, f"{KILL_AT_STEP} steps")
    victim = pids(place)[VICTIM][-1]
    (rendezvous,) = job.parts("unbroken.rendezvous")
    story.tell("we", f"SIGKILL to rank {VICTIM}, process {victim}", "bold red")
    os.kill(victim, signal.SIGKILL)
    status = watched.until("an interruption", "interrupted", "planned")
    rendezvous.send_signal(signal.SIGKILL)
    story.tell("rendezvous", status["message"], "yellow")
    story.tell("we", f"SIGKILL to the rendezvous, process {rendezvous.pid}: the recovery is not over", "bold red")
    if any(one["ended_at"] for one in status["recoveries"]):
        raise RecordingError("want a recovery that is under way, got one that was over already")
    num_applied = len(lines(place, "applied"))
    term = status["term"]
    while (status := watched.until("a job that trains again", "running"))["term"] == term:
        pass
    story.tell("rendezvous", f"another process, term {status['term']}: {status['message']}", "green")
    for one in status["recoveries"]:
        takers = ", ".join(one["replaced_by"]) or "nobody"
        story.tell("", f"knows of the {one['cause']} of {one['pod'] or 'the job'}: {takers} took over", "dim")
    job.until(lambda: len(lines(place, "applied")) > num_applied, "another step")
    story.tell("training", f"goes on after step {num_applied}", "green")


def judge(place: Path, code: int, console: Console) -> list[str]:
    """Print who trained where; return what was lost."""
    applied, processes = lines(place, "applied"), pids(place)
    table = Table("rank", "process at first", "process at last", "", title_style="bold")
    problems = [] if code == 0 else [f"want exit code 0 of the job, got {code}"]
    for rank, mine in sorted(processes.items()):
        is_same = mine[0] == mine[-1]
        word = "the same, never restarted" if is_same else "killed; the spare took its rank over"
        table.add_row(str(rank), str(mine[0]), str(mine[-1]), Text(word, style="green" if is_same else "yellow"))
        if is_same is (rank == VICTIM):
            problems.append(f"rank {rank}: processes {mine}")
    console.print(table)
    if applied != [str(step) for step in range(NUM_STEPS)]:
        problems.append(f"want each of {NUM_STEPS} steps once, got {applied}")
    else:
        console.print(Text(f"{NUM_STEPS} of {NUM_STEPS} steps applied, each exactly once; the job is complete", "bold"))
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.recordings.rendezvous_kill", description=__doc__)
    parser.add_argument("--svg", type=Path, help="also write a picture of it to this file")
    options = parser.parse_args(arguments)
    console = Console(record=True, width=132, highlight=False)
    with tempfile.TemporaryDirectory(prefix="rendezvous-kill-") as folder:
        place = Path(folder)
        os.environ["PLACE"] = folder
        story = Story(console)
        story.tell("we", f"unbroken run {' '.join(OPTIONS[2:])} train.py", "bold")
        try:
            with local_job([*OPTIONS, str(SCRIPT)]) as job:
                break_it(job, place, story)
                problems = judge(place, job.process.wait(LIMIT_S), console)
        except RecordingError as error:
            problems = [str(error)]
    for problem in problems:
        console.print(Text(problem, style="bold red"), soft_wrap=True)
    if options.svg and not problems:
        options.svg.write_text(console.export_svg(title="a rendezvous killed during a recovery"), encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
