"""What a job's own processes cost: how soon they work after their start, and the memory that they hold.

    python benchmarks/footprint.py --runs 10

- rendezvous: from fork until it answers GET /v1/status with the token.
- agent: from fork until the rendezvous has accepted it.

Memory is read after /metrics was served once. PSS: what is shared with other processes of this machine counts by its
share; RSS counts it whole.
"""

import argparse
import os
import re
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import settings_to_json

LIMIT_S = 30.0
TOKEN = "the-token-of-the-footprint"
NUM_RANKS = 8


@dataclass(frozen=True)
class Footprint:
    """One process."""

    start_s: float
    pss_mib: float
    rss_mib: float


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    """Look every millisecond. Raises RuntimeError when the process ends or LIMIT_S is over."""
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"{process.args!r}: want it to work within {LIMIT_S:g} s, got {process.poll()}")
        time.sleep(0.001)


def memory_mib(pid: int, field: str) -> float:
    """Return Pss or Rss of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kib) for kib in re.findall(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)) / 1024


def answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    """Return whether a GET with the token is answered."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S, context=context) as answer:
            return bool(answer.read())
    except urllib.error.URLError:
        return False


@contextmanager
def started(module: str, environment: dict[str, str], log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Start one of our processes; end it afterwards."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", module]
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def look(process: "subprocess.Popen[bytes]", since_s: float, metrics_url: str) -> Footprint:
    """Measure a process that works since now."""
    start_s = time.monotonic() - since_s
    wait_for(lambda: answers(metrics_url), process)
    return Footprint(start_s, memory_mib(process.pid, "Pss"), memory_mib(process.pid, "Rss"))


def measure(folder: Path) -> dict[str, Footprint]:
    """Start a rendezvous and an agent once."""
    (folder / "token").write_text(TOKEN)
    port, ports = free_port(), {"rendezvous": free_port(), "agent": free_port()}
    common = {
        "UNBROKEN_SETTINGS": settings_to_json(JobSettings("footprint", replicas=1, ranks_per_pod=NUM_RANKS)),
        "UNBROKEN_TOKEN_FILE": str(folder / "token"),
    }
    urls = {name: f"http://127.0.0.1:{ports[name]}/metrics" for name in ports}
    found: dict[str, Footprint] = {}
    listen = {"UNBROKEN_LISTEN": f"127.0.0.1:{port}", "UNBROKEN_METRICS_LISTEN": f"127.0.0.1:{ports['rendezvous']}"}
    since_s = time.monotonic()
    with started("unbroken.rendezvous", common | listen, folder / "rendezvous.log") as rendezvous:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/v1/status"), rendezvous)
        found["rendezvous"] = look(rendezvous, since_s, urls["rendezvous"])
        pod = {
            "UNBROKEN_RENDEZVOUS_URL": f"http://127.0.0.1:{port}",
            "UNBROKEN_METRICS_LISTEN": f"127.0.0.1:{ports['agent']}",
            "UNBROKEN_POD": "footprint-0",
            "UNBROKEN_POD_UID": "uid",
            "UNBROKEN_POD_IP": "127.0.0.1",
            "UNBROKEN_DIR": str(folder),
        }
        log = folder / "agent.log"
        since_s = time.monotonic()
        with started("unbroken.agent", common | pod, log) as agent:
            wait_for(lambda: b"accepted by the rendezvous" in log.read_bytes(), agent)
            found["agent"] = look(agent, since_s, urls["agent"])
    return found


def main() -> None:
    """Measure, and print a table of medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10, help="starts of each process (%(default)s)")
    arguments = parser.parse_args()
    runs = []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory(prefix="footprint-") as folder:
            runs.append(measure(Path(folder)))
    print("| process | start, ms (median) | max | PSS, MiB | RSS, MiB |")
    print("|---|--:|--:|--:|--:|")
    for name in runs[0]:
        column = [run[name] for run in runs]
        start_ms = [1000 * one.start_s for one in column]
        pss_mib = statistics.median(one.pss_mib for one in column)
        rss_mib = statistics.median(one.rss_mib for one in column)
        print(f"| {name} | {statistics.median(start_ms):.0f} | {max(start_ms):.0f} | {pss_mib:.1f} | {rss_mib:.1f} |")


if __name__ == "__main__":
    main()
