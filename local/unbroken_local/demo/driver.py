"""Runs the demonstration: cluster up, job applied, six faults one after the other, verdict, cluster down."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unbroken_core.vocabulary.errors import UnbrokenError
from unbroken_local.demo.faults import (
    FaultKind,
    Victim,
    choose_victim,
    deviations,
    has_recovered,
    newest_recovery,
    record_after,
    recoveries_after,
    steps_lost,
)
from unbroken_local.demo.manifest import number_of_steps, with_folder
from unbroken_local.demo.observer import Observer
from unbroken_local.demo.processes import find_worker, read_processes
from unbroken_local.demo.render import Line, Row
from unbroken_local.demo.snapshot import Snapshot
from unbroken_local.demo.tools import Cluster, operator_service
from unbroken_local.demo.verdict import violations
from unbroken_local.kube import Json
from unbroken_local.kube.client import KubeClient
from unbroken_local.kube.kubeconfig import read_kubeconfig

SLOW_STEP_S = 0.25
"""Step time while there are faults to come, so that the training outlasts them."""
START_LIMIT_S = 90.0
RECOVERY_LIMIT_S = 45.0
RECORD_LIMIT_S = 20.0
SPARES_LIMIT_S = 60.0
END_LIMIT_S = 60.0


@dataclass(frozen=True)
class Places:
    """Files of one demonstration."""

    checkout: Path
    output: Path

    @property
    def job(self) -> Path:
        """The example's manifest."""
        return self.checkout / "examples" / "digits.yaml"

    @property
    def crds(self) -> Path:
        """Folder with the custom resource definition."""
        return self.checkout / "crds"

    @property
    def data(self) -> Path:
        """Folder that all pods of the job share."""
        return self.output / "data"

    @property
    def control(self) -> Path:
        """Folder with the files that tell the example which fault to have."""
        return self.data / "control"

    @property
    def result(self) -> Path:
        """What the example files at its end."""
        return self.data / "checkpoints" / "result.json"

    @property
    def diagnostics(self) -> Path:
        """What the parts said, when it went wrong."""
        return self.output / "diagnostics.txt"


class Driver:
    """One demonstration. `problems` is complete when train_through_faults returned or raised."""

    def __init__(self, places: Places, tell: Callable[[Line], None]) -> None:
        self.problems: list[str] = []
        self.memorable = Snapshot()
        """The moment after the node's loss, for a picture."""
        self.cluster = Cluster(places.output / "cluster", places.checkout / "examples" / "nodes-10.yaml")
        self.places = places
        self._tell = tell
        self._began_s = time.monotonic()
        self._observer: Observer | None = None
        self._faults: list[tuple[FaultKind, tuple[int, int]]] = []
        self._lost: dict[FaultKind, int | None] = {}
        """What each fault cost, in steps."""
        self._job: Json = yaml.safe_load(places.job.read_text(encoding="utf-8"))
        self._operator = operator_service(self.cluster.env, places.output / "operator.log")

    @property
    def snapshot(self) -> Snapshot:
        """The job at this moment."""
        return self._observer.snapshot if self._observer else Snapshot()

    @property
    def rows(self) -> list[Row]:
        """Each fault so far with the record of its recovery, then the recoveries that no fault of ours led to."""
        now = self.snapshot
        rows = [Row(kind.value, record_after(now, mark), self._lost.get(kind)) for kind, mark in self._faults]
        answered = [row.record for row in rows]
        return rows + [Row("not of our making", record) for record in now.history if record not in answered]

    def say(self, text: str, style: str = "") -> None:
        """Add a line to the story."""
        self._tell(Line(time.monotonic() - self._began_s, text, style))

    async def set_up(self, stack: AsyncExitStack) -> None:
        """Start the cluster and the operator, apply the job; `stack` takes all of it down. Raises UnbrokenError."""
        output = self.places.output
        shutil.rmtree(output, ignore_errors=True)
        self.places.control.mkdir(parents=True)
        (self.places.control / "step-seconds").write_text(f"{SLOW_STEP_S}\n")
        self.say("starting a cluster on this machine: unbroken local up --nodes examples/nodes-10.yaml")
        stack.push_async_callback(self.cluster.down)
        await self.cluster.up()
        self.say("starting the operator: python -m unbroken_operator --all-namespaces")
        await self.cluster.kubectl("apply", "-f", str(self.places.crds))
        stack.push_async_callback(self._operator.stop)
        self._operator.start()
        client = await stack.enter_async_context(KubeClient(read_kubeconfig(self.cluster.kubeconfig)))
        self._observer = Observer(client, "default", self._job["metadata"]["name"])
        following = asyncio.create_task(self._observer.run())
        stack.callback(following.cancel)
        self.say("kubectl apply -f examples/digits.yaml")
        manifest = output / "digits.yaml"
        manifest.write_text(yaml.safe_dump(with_folder(self._job, str(self.places.data)), sort_keys=False))
        await self.cluster.kubectl("apply", "-f", str(manifest))

    async def train_through_faults(self) -> None:
        """Wait for training, break it in every way, see it complete. Raises UnbrokenError when it does not go on."""
        wanted = self._num_spares
        await self._wait("training with all spares ready", lambda now: _is_whole(now, wanted), START_LIMIT_S)
        self.say("all ranks train, all spares are ready", "green")
        for kind in FaultKind:
            await self._have_fault(kind)
            whole = await self._wait("spares ready again", lambda now: _is_whole(now, wanted), SPARES_LIMIT_S)
            if kind is FaultKind.NODE_DOWN:
                self.memorable = whole
        self.say("no more faults: training on at full speed")
        (self.places.control / "step-seconds").write_text("0\n")
        end = await self._wait("the job's end", lambda now: now.state in {"Complete", "Failed"}, END_LIMIT_S)
        found = violations(end, _read_json(self.places.result), number_of_steps(self._job))
        self.problems += found
        self._describe_end(found)

    async def _have_fault(self, kind: FaultKind) -> None:
        before = self.snapshot
        mark, victim = newest_recovery(before), choose_victim(kind, before)
        if kind is FaultKind.NO_OPERATOR:
            self.say("stopping the operator")
            await self._operator.stop()
        self.say(f"{kind.value}: {victim}", "bold red")
        self._faults.append((kind, mark))
        await self._break(kind, victim)
        after = await self._wait(f"recovery: {kind.value}", lambda now: has_recovered(now, mark), RECOVERY_LIMIT_S)
        recovery = recoveries_after(after, mark)[0]
        who = f"{', '.join(recovery.replaced_by)} took over" if recovery.replaced_by else "in the same processes"
        self._lost[kind] = steps_lost(
            await self._wait("what was restored", lambda now: steps_lost(now) is not None, RECORD_LIMIT_S)
        )
        told = f"steps lost: {self._lost[kind]}"
        self.say(f"recovered from {recovery.cause} by rung {recovery.rung}: {who}, {told}", "green")
        if kind is FaultKind.NO_OPERATOR:
            self.say("starting the operator again")
            self._operator.start()
        noted = await self._wait(
            "the operator's record", lambda now: record_after(now, mark) is not None, RECORD_LIMIT_S
        )
        self.problems += deviations(kind, recoveries_after(noted, mark))

    async def _break(self, kind: FaultKind, victim: Victim) -> None:
        if kind in {FaultKind.RAISE, FaultKind.HANG}:
            word = "raise" if kind is FaultKind.RAISE else "hang"
            temporary = self.places.control / ".fault"
            temporary.write_text(f"{word} {victim.rank}\n")
            temporary.replace(self.places.control / "fault")
        elif kind in {FaultKind.KILL, FaultKind.NO_OPERATOR}:
            pid = find_worker(read_processes(), victim.pod_uid, victim.local_rank)
            if pid is None:
                raise UnbrokenError(f"{victim}: want its process on this machine, got none")
            os.kill(pid, signal.SIGKILL)
        elif kind is FaultKind.DELETE_POD:
            await self.cluster.kubectl("delete", "pod", victim.pod, "--wait=false")
        else:
            await self.cluster.fail_node(victim.node)

    async def _wait(self, what: str, is_there: Callable[[Snapshot], bool], limit_s: float) -> Snapshot:
        if self._observer is None:
            raise UnbrokenError(f"{what}: want a cluster that was set up, got none")
        if not self._operator.is_running and self._operator.exit_code not in {None, 0, -signal.SIGTERM}:
            raise UnbrokenError(f"operator: want it to run, got exit code {self._operator.exit_code}")
        return await self._observer.wait(what, is_there, limit_s)

    @property
    def _num_spares(self) -> int:
        return int((self._job["spec"].get("spares") or {}).get("count", 0))

    def _describe_end(self, found: list[str]) -> None:
        result = _read_json(self.places.result) or {}
        if found:
            return
        self.say(
            f"complete: test accuracy {result['accuracy']:.3f}, {result['steps']} steps, each applied exactly once, "
            f"in {result['iterations']} iterations; "
            f"steps lost: {sum(lost or 0 for lost in self._lost.values())}",
            "bold green",
        )

    async def gather_diagnostics(self) -> None:
        """Write what helps to understand a failure to places.diagnostics."""
        self.say("it went wrong: gathering what the parts said", "bold red")
        commands = [
            ("get", "nodes,pods", "-o", "wide"),
            ("get", "rtj", "-o", "yaml"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        ]
        commands += [("logs", pod.name, "--all-containers", "--prefix", "--tail=30") for pod in self.snapshot.pods]
        parts = []
        for command in commands:
            try:
                text = await self.cluster.kubectl(*command, limit_s=10.0)
            except UnbrokenError as error:
                text = f"{error}\n"
            parts.append(f"$ kubectl {' '.join(command)}\n{text}")
        for log in sorted(self.places.output.glob("*.log")):
            tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-60:]
            parts.append(f"$ tail {log.name}\n" + "\n".join(tail) + "\n")
        self.places.diagnostics.write_text("\n".join(parts), encoding="utf-8")


def _is_whole(snapshot: Snapshot, num_spares: int) -> bool:
    return snapshot.is_training and snapshot.num_ready_spares >= num_spares


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
