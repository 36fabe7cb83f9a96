"""What every surface says of a job, each second, beside what is so: how old did a lie get?

A part that gets no processor cannot be told from one that is away. So what a statement takes for granted (an operator
that works, a rendezvous that answers) is looked at with each statement, and time without it does not count.
"""

import asyncio
import contextlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from unbroken_cli.commands import status as status_command
from unbroken_cli.commands.framework import as_json, now, read_job
from unbroken_cli.errors import CommandError
from unbroken_cli.text import status_lines
from unbroken_core.vocabulary.errors import InputError
from unbroken_local.demo.processes import Process, read_processes
from unbroken_local.kube.client import ApiError, KubeClient

from .e2e_bench import Bench

ANSWER_S = 1.0
"""Who answers later has no processor, or is away."""
TICK_S = 1.0
_CHARGED_S = 3.0
"""Looks that are further apart say nothing of the rest of the time in between."""


@dataclass(frozen=True)
class Facts:
    """What is so; None: not known at this look."""

    has_operator: bool | None
    has_rendezvous: bool | None
    num_workers: int
    num_pods: int
    """Training pods of which something runs on this machine."""


@dataclass(frozen=True)
class Words:
    """What the surfaces say; "" or None: nothing."""

    state: str = ""
    running: str = ""
    pods_ready: str = ""
    active: int | None = None
    text: str = ""
    json_state: str = ""
    json_stale: str = ""
    metric: str = ""


@dataclass
class Ledger:
    """How long each lie went on, by what was said and what was so."""

    since_s: dict[str, float] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)
    num_wanted: int = 2
    """Training pods that the job wants."""
    num_looks: int = 0
    num_unclear: int = 0
    num_failed: int = 0
    lasted_s: float = 0.0
    states: set[str] = field(default_factory=set)

    def look(self, facts: Facts, words: Words, elapsed_s: float) -> None:
        """Take one look, so long after the last."""
        self.num_looks += 1
        self.lasted_s += elapsed_s
        self.num_unclear += facts.has_operator is None or facts.has_rendezvous is None
        self.states.add(words.state)
        elapsed_s = min(elapsed_s, _CHARGED_S)
        lies = set(_lies(facts, words, self.num_wanted))
        self.since_s = {lie: self.since_s[lie] + elapsed_s if lie in self.since_s else 0.0 for lie in lies}
        for lie, age_s in self.since_s.items():
            self.longest_s[lie] = max(self.longest_s.get(lie, 0.0), age_s)

    @property
    def num_clear(self) -> int:
        """Looks at parts of which it was known whether they were there."""
        return self.num_looks - self.num_unclear

    def table(self) -> str:
        """Return the report."""
        rows = [f"{age_s:6.1f} s  {lie}" for lie, age_s in sorted(self.longest_s.items(), key=lambda item: -item[1])]
        pause_s = self.lasted_s / max(self.num_looks, 1)
        seen = (
            f"{self.num_looks} looks, one in {pause_s:.1f} s, {self.num_unclear} of them at parts without a processor, "
            f"{self.num_failed} without an answer of the API server, states {sorted(self.states)}"
        )
        return "\n".join([seen, "longest time for which it was said and not so:", *rows])


def _lies(facts: Facts, words: Words, num_wanted: int) -> Iterator[str]:
    """Yield what is said and not so."""
    says_training = {
        "column State": words.state == "Running",
        "condition Running": words.running == "True",
        "metric unbroken_job_state": words.metric == "Running",
        "unbroken status": words.text.startswith("TRAINING"),
        "unbroken status -o json": words.json_state == "Running" and not words.json_stale,
    }
    of_operator = ("column State", "condition Running", "metric unbroken_job_state")
    for surface, is_said in says_training.items():
        if is_said and facts.has_operator and facts.has_rendezvous is False:
            yield f"{surface}: trains, without a rendezvous"
        if is_said and facts.has_operator is False and surface not in of_operator:
            yield f"{surface}: trains, without an operator"
        if is_said and facts.has_operator and facts.has_rendezvous and facts.num_workers == 0:
            yield f"{surface}: trains, without a worker"
    if words.pods_ready == "True" and facts.has_operator and facts.num_pods < num_wanted:
        yield "condition PodsReady: all run, though one does not"
    if not (facts.has_operator and facts.has_rendezvous):
        return
    # While it recovers, Active is the size of the world that is repaired, however long a new pod takes.
    if words.state == "Running" and words.active is not None and words.active > facts.num_workers:
        yield "column Active: more than there are"
    if words.state == "Unknown":
        yield "column State: unknown, though operator and rendezvous answer"
    if words.text.startswith("UNKNOWN"):
        yield "unbroken status: unknown, though operator and rendezvous answer"


class Witness:
    """Looks at one job in the namespace of its name. In this process, as far as can be: a look is to cost little."""

    def __init__(self, bench: Bench, client: KubeClient, job: str) -> None:
        self._bench = bench
        self._client = client
        self._job = job
        words = [job, "-n", job, "--kubeconfig", str(bench.cluster.kubeconfig)]
        self._arguments = status_command.parser().parse_args(words)
        self.stopped: set[str] = set()
        """Parts that the test itself has taken away: operator, rendezvous."""

    async def look(self) -> tuple[Facts, Words]:
        """Return both, as of about the same instant. Raises ApiError and CommandError when there is no answer."""
        stopped = set(self.stopped)
        facts, words = await asyncio.gather(self._facts(), self._words())
        if stopped != self.stopped:
            return Facts(
                None, None, facts.num_workers, facts.num_pods
            ), words  # It changed in between: of one of both, not of both.
        return facts, words

    async def pods(self) -> list[dict[str, Any]]:
        """Return the job's pods."""
        path = f"/api/v1/namespaces/{self._job}/pods"
        pods: list[dict[str, Any]] = (await self._client.get(path, labelSelector=f"unbroken.dev/job={self._job}"))[
            "items"
        ]
        return pods

    async def leader(self) -> dict[str, Any] | None:
        """Return the rendezvous pod that agents are led to; None for none."""
        return _leader(await self.pods())

    async def _facts(self) -> Facts:
        pods = await self.pods()
        leader, trainers = _leader(pods), {pod["metadata"]["uid"] for pod in pods if _component(pod) == "trainer"}
        operator, rendezvous, found = await asyncio.gather(
            answers(f"http://127.0.0.1:{self._bench.metrics_port}/healthz"),
            _never() if leader is None else answers(f"http://{leader['status']['podIP']}:29601/healthz"),
            asyncio.to_thread(_running, trainers),
        )
        return Facts(
            False if "operator" in self.stopped else operator,
            False if "rendezvous" in self.stopped else rendezvous,
            *found,
        )

    async def _words(self) -> Words:
        path = f"/apis/unbroken.dev/v1alpha1/namespaces/{self._job}/resilienttrainingjobs/{self._job}"
        item, record, metric = await asyncio.gather(
            self._client.get(path), asyncio.to_thread(read_job, self._arguments), self._metric()
        )
        status = item.get("status") or {}
        conditions = {condition["type"]: condition["status"] for condition in status.get("conditions") or ()}
        told = as_json(record)
        return Words(
            status.get("state", ""),
            conditions.get("Running", ""),
            conditions.get("PodsReady", ""),
            (status.get("ranks") or {}).get("active"),
            status_lines(record, now())[0].partition(": ")[2],
            told["state"],
            told["stale"],
            metric,
        )

    async def _metric(self) -> str:
        url = f"http://127.0.0.1:{self._bench.metrics_port}/metrics"
        for line in (await asyncio.to_thread(_get, url)).splitlines():
            if line.startswith("unbroken_job_state{") and line.endswith(" 1.0") and f'"{self._job}"' in line:
                return line.partition('state="')[2].partition('"')[0]
        return ""


async def _never() -> bool:
    return False


def _leader(pods: list[dict[str, Any]]) -> dict[str, Any] | None:
    found = [pod for pod in pods if _component(pod) == "rendezvous"]
    there = [pod for pod in found if pod.get("status", {}).get("podIP") and not _is_ending(pod)]
    return there[-1] if there else None


def _component(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["unbroken.dev/component"])


def workers(pod_uids: set[str]) -> list[int]:
    """Return the pids of the job's workers on this machine: those that a launcher has started."""
    return _workers(read_processes(), pod_uids)


def _running(pod_uids: set[str]) -> tuple[int, int]:
    """Return how many workers these pods have on this machine, and of how many of the pods something runs."""
    processes = read_processes()
    there = {process.environment.get("UNBROKEN_POD_UID") for process in processes.values()}
    return len(_workers(processes, pod_uids)), len(pod_uids & there)


def _workers(processes: dict[int, Process], pod_uids: set[str]) -> list[int]:
    found = {
        pid
        for pid, process in processes.items()
        if process.environment.get("UNBROKEN_POD_UID") in pod_uids and "UNBROKEN_LOCAL_RANK" in process.environment
    }
    return [pid for pid in found if processes[pid].parent not in found]


async def answers(url: str) -> bool | None:
    """Return whether a part answers; None when it takes too long to say."""
    try:
        return bool(await asyncio.to_thread(_get, url, True))
    except TimeoutError:
        return None


def _get(url: str, is_strict: bool = False) -> str:
    """Return the page, "" when nobody answers. Raises TimeoutError, if strict, when the answer takes too long."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            text: str = answer.read().decode()
            return text
    except TimeoutError:
        if is_strict:
            raise
    except urllib.error.URLError as error:
        if is_strict and isinstance(error.reason, TimeoutError):
            raise TimeoutError from error
    except OSError:
        pass
    return ""


def _is_ending(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


async def watch(witness: Witness, ledger: Ledger, stop: asyncio.Event) -> None:
    """Look once a second until `stop` is set."""
    last_s = time.monotonic()
    while not stop.is_set():
        began_s = time.monotonic()
        try:
            facts, words = await witness.look()
            ledger.look(facts, words, began_s - last_s)
            last_s = began_s
        except (ApiError, CommandError, InputError):
            ledger.num_failed += 1  # No answer of the API server is no statement.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), max(TICK_S - (time.monotonic() - began_s), 0.01))
