"""How the rendezvous grows: N real connections join, are interrupted, get plans and say that they live.

    python benchmarks/rendezvous.py --sizes 128,1024,4096 --rounds 5

The rendezvous is the process of the product; its members are connections from a second process, in clear or (--tls)
encrypted, with eight workers each and a rack for sixteen. Nothing runs between the steps.

- join: from the first connection until the last member has its first plan.
- interrupt: from the report of an exception until the last member has the interrupt.
- plan: from the report of the last member that gets READY until the last member has its plan.
- at once: the same, where all members get READY, and say so, at one instant.
- steady: share of one core that the rendezvous uses while each member sends a heartbeat a second.
- torch: N processes in torch's DynamicRendezvousHandler on a TCPStore, until the last has its rank (first round), and
  the next round, which is what a fault costs there. In turn with ours.

CPU is what the rendezvous' process used in that step: it does not depend on what else this machine does.
"""

import argparse
import json
import os
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from footprint import LIMIT_S, TOKEN, answers, free_port, memory_mib, started, wait_for
from unbroken_core.conventions.tls import client_context, server_name
from unbroken_core.protocol.settings import JobSettings, Timeouts
from unbroken_core.protocol.wire import settings_to_json
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import JobPhase
from unbroken_operator.adapters.certificates import make_certificates

HERE = Path(__file__).resolve().parent
HEARTBEAT_S = 300.0
"""Members say nothing between the steps: nobody may be taken for lost, however long one takes."""


@dataclass(frozen=True)
class Cost:
    """One step: seconds by the clock of the members, and of the rendezvous' processor time."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Run:
    """One job of N members."""

    size: int
    join: Cost
    interrupt: Cost
    plan: Cost
    at_once: Cost
    steady_ratio: float
    beats_per_s: float
    memory_mib: float


class Bench:
    """A rendezvous and its members."""

    def __init__(
        self, pid: int, members: "subprocess.Popen[str]", status_url: str, context: ssl.SSLContext | None
    ) -> None:
        self._pid = pid
        self._members = members
        self._status_url = status_url
        self._context = context

    def cpu_s(self) -> float:
        """Return the processor seconds that the rendezvous has used."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def tell(self, command: str) -> Cost:
        """Give the members a command. Raises RuntimeError when they fail."""
        before_s = self.cpu_s()
        if self._members.stdin is None or self._members.stdout is None:
            raise RuntimeError("members: want pipes")
        self._members.stdin.write(command + "\n")
        self._members.stdin.flush()
        answer = self._members.stdout.readline()
        if not answer:
            raise RuntimeError(f"members: {command}: want an answer, they ended")
        return Cost(json.loads(answer)["seconds"], self.cpu_s() - before_s)

    def enter(self) -> None:
        """Let all members run, and wait until the rendezvous knows."""
        self.tell("run")
        until_s = time.monotonic() + LIMIT_S
        while (phase := self._phase()) != JobPhase.RUNNING.value:
            if time.monotonic() > until_s:
                raise RuntimeError(f"phase: want {JobPhase.RUNNING.value} within {LIMIT_S:g} s, got {phase}")
            time.sleep(0.1)

    def rest(self) -> None:
        """Wait until the rendezvous has nothing to do."""
        until_s, before_s = time.monotonic() + LIMIT_S, -1.0
        while (now_s := self.cpu_s()) != before_s and time.monotonic() < until_s:
            before_s = now_s
            time.sleep(0.2)

    def _phase(self) -> str:
        request = urllib.request.Request(self._status_url, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=LIMIT_S, context=self._context) as answer:
            return str(json.load(answer)["phase"])


@contextmanager
def job(size: int, ranks_per_pod: int, folder: Path, is_encrypted: bool) -> Iterator[tuple[Bench, int]]:
    """Start a rendezvous and the process of its members; end both afterwards."""
    (folder / "token").write_text(TOKEN)
    settings = JobSettings(
        "bench",
        replicas=size,
        ranks_per_pod=ranks_per_pod,
        layers=(Layer("rack", "bench/rack"),),
        no_progress_limit=1_000_000,
        timeouts=Timeouts(heartbeat_s=HEARTBEAT_S),
    )
    port = free_port()
    environment = {
        "UNBROKEN_SETTINGS": settings_to_json(settings),
        "UNBROKEN_TOKEN_FILE": str(folder / "token"),
        "UNBROKEN_LISTEN": f"127.0.0.1:{port}",
    }
    url, context, member_environment = f"http://127.0.0.1:{port}/v1/status", None, {"BENCH_TOKEN": TOKEN}
    if is_encrypted:
        name = server_name(settings.job, settings.namespace)
        certificates = make_certificates([name, "localhost"])
        files = {"authority": certificates.authority, "certificate": certificates.certificate, "key": certificates.key}
        for file, text in files.items():
            (folder / file).write_text(text)
        environment |= {
            "UNBROKEN_TLS_CERTIFICATE": str(folder / "certificate"),
            "UNBROKEN_TLS_KEY": str(folder / "key"),
        }
        member_environment |= {"BENCH_CA": str(folder / "authority"), "BENCH_SERVER_NAME": name}
        url, context = f"https://localhost:{port}/v1/status", client_context(certificates.authority)
    command = [
        sys.executable,
        str(HERE / "systems" / "rendezvous_members.py"),
        str(port),
        str(size),
        str(ranks_per_pod),
    ]
    with started("unbroken.rendezvous", environment, folder / "rendezvous.log") as rendezvous:
        wait_for(lambda: answers(url, context), rendezvous)
        members = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **member_environment},
        )
        try:
            yield Bench(rendezvous.pid, members, url, context), rendezvous.pid
        finally:
            members.kill()
            members.communicate()


def measure(size: int, arguments: argparse.Namespace) -> Run:
    """Run one job of this size through all steps."""
    rounds, steady_s = arguments.rounds, arguments.steady_s
    with (
        tempfile.TemporaryDirectory(prefix="rendezvous-") as folder,
        job(size, arguments.ranks_per_pod, Path(folder), arguments.tls) as (bench, pid),
    ):
        join = bench.tell("join")
        bench.enter()
        interrupts, plans, at_once = [], [], []
        for turn in range(2 * rounds):
            interrupts.append(bench.tell("fault"))
            if turn % 2:
                at_once.append(bench.tell("ready"))
            else:
                bench.tell("almost")
                bench.rest()
                plans.append(bench.tell("last"))
            bench.enter()
        before_s = bench.cpu_s()
        beats = bench.tell(f"beat {steady_s}").wall_s
        steady = (bench.cpu_s() - before_s) / steady_s
        return Run(
            size=size,
            join=join,
            interrupt=_median(interrupts),
            plan=_median(plans),
            at_once=_median(at_once),
            steady_ratio=steady,
            beats_per_s=beats,
            memory_mib=memory_mib(pid, "Pss"),
        )


def _median(costs: Iterable[Cost]) -> Cost:
    wall_s, cpu_s = zip(*((cost.wall_s, cost.cpu_s) for cost in costs), strict=True)
    return Cost(statistics.median(wall_s), statistics.mean(cpu_s))


def torch_rounds(size: int) -> list[float]:
    """Return the seconds of torch's first and next round with this number of members."""
    command = [sys.executable, str(HERE / "systems" / "rendezvous_torch.py"), str(size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(runs: list[Run]) -> str:
    """Return the medians as a table for people."""
    lines = [
        "| N | join, s (CPU) | CPU a member, µs | interrupt, ms (CPU) | plan, ms (CPU) | at once, ms (CPU) "
        "| steady, % of a core | PSS, MiB |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for size in sorted({run.size for run in runs}):
        same = [run for run in runs if run.size == size]
        join = _median([run.join for run in same])
        steps = [
            _median(costs) for costs in zip(*((run.interrupt, run.plan, run.at_once) for run in same), strict=True)
        ]
        steady = statistics.median(run.steady_ratio for run in same)
        memory = statistics.median(run.memory_mib for run in same)
        lines.append(
            f"| {size} | {join.wall_s:.2f} ({join.cpu_s:.2f}) | {1e6 * join.cpu_s / size:.0f} "
            f"| {' | '.join(map(_ms, steps))} | {100 * steady:.0f} | {memory:.0f} |"
        )
    return "\n".join(lines)


def _ms(cost: Cost) -> str:
    return f"{1000 * cost.wall_s:.0f} ({1000 * cost.cpu_s:.0f})"


def compare(runs: list[Run], rounds: list[list[float]], size: int) -> str:
    """Return a line with torch's figures and how they stand to ours."""
    ours = [run for run in runs if run.size == size]
    join_s = statistics.median(run.join.wall_s for run in ours)
    again_s = statistics.median(run.interrupt.wall_s + run.at_once.wall_s for run in ours)
    first_s, next_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    return (
        f"torch, N={size}: first round {first_s:.2f} s ({first_s / join_s:.0f} times ours), "
        f"next round {next_s:.2f} s ({next_s / again_s:.0f} times our interrupt and plan at once)"
    )


def main() -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="128,1024,4096", help="members (%(default)s)")
    parser.add_argument("--ranks-per-pod", type=int, default=8, help="workers of a member (%(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="jobs of each size (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="interruptions of a job (%(default)s)")
    parser.add_argument("--steady-s", type=float, default=10.0, help="seconds with heartbeats (%(default)s)")
    parser.add_argument("--torch-size", type=int, default=128, help="members of torch's rendezvous, 0: none")
    parser.add_argument("--tls", action="store_true", help="encrypt, as the operator's jobs do")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    runs: list[Run] = []
    rounds: list[list[float]] = []
    for _ in range(arguments.runs):
        for size in map(int, arguments.sizes.split(",")):
            runs.append(measure(size, arguments))
            print(table(runs[-1:]).splitlines()[-1], file=sys.stderr)
            if size == arguments.torch_size:
                rounds.append(torch_rounds(size))
    print(table(runs))
    if rounds:
        print(compare(runs, rounds, arguments.torch_size))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"runs": [asdict(run) for run in runs], "torch": rounds}))


if __name__ == "__main__":
    main()
