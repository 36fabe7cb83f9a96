"""Parts of ours are taken away and brought back at random: nothing that any surface says stays wrong for long.

UNBROKEN_TRUTH_SECONDS=600 UNBROKEN_TRUTH_SEED=7   for longer, and another order of events
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.waiting import eventually

from unbroken_local.demo.processes import read_processes
from unbroken_local.demo.tools import Service
from unbroken_local.kube.client import ApiError, KubeClient
from unbroken_local.kube.kubeconfig import read_kubeconfig

from .e2e_bench import FULL, KUBECTL_PAUSE_S, MODERN, Bench, job
from .truth import Facts, Ledger, Witness, Words, watch, workers

NAME = "truthful"
PROFILES = ("local", "full", "modern")
SECONDS = float(os.environ.get("UNBROKEN_TRUTH_SECONDS", "60"))
SEED = int(os.environ.get("UNBROKEN_TRUTH_SEED", "1"))
HEARTBEAT_S = 8.0
LIE_S = 15.0
NUM_RANKS = 2
NUM_LOOKS = 20
"""So many looks at parts that had a processor are worth a verdict."""


def pids_of(pod_uid: str) -> list[int]:
    return [pid for pid, found in read_processes().items() if found.environment.get("UNBROKEN_POD_UID") == pod_uid]


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.asynccontextmanager
async def leased_operator(bench: Bench) -> AsyncIterator[Service]:
    """An operator with a Lease instead of the bench's own: without one nobody can tell that it is away."""
    await bench.operator.stop()
    service = Service(
        "operator", (*bench.operator.command, "--lease", "default/truth"), bench.operator.env, bench.operator.log
    )
    service.start()
    try:
        yield service
    finally:
        await service.stop()
        bench.operator.start()


Kinds = list[Callable[[], Awaitable[None]]]


class Trouble:
    """What happens to the parts."""

    def __init__(self, bench: Bench, witness: Witness, operator: Service, dice: random.Random) -> None:
        self._bench = bench
        self._witness = witness
        self._operator = operator
        self._dice = dice
        self.events: list[str] = []
        self._kinds: Kinds = [
            self.operator_stands,
            self.node_fails,
            self.rendezvous_deleted,
            self.rendezvous_stands,
            self.node_falls_silent,
            self.operator_killed,
            self.both_stand,
            self.worker_killed,
            self.node_cordoned,
        ]
        # In a minute, three or more: those of all profiles are all kinds.
        first = 3 * PROFILES.index(bench.profile)
        self._next = self._shuffled(self._kinds[first : first + 3]) + self._shuffled(
            self._kinds[:first] + self._kinds[first + 3 :]
        )

    def _shuffled(self, kinds: Kinds) -> Kinds:
        return self._dice.sample(kinds, len(kinds))

    async def happen(self) -> None:
        """Let one thing happen, and end. All kinds come before one comes again."""
        if not self._next:
            self._next = self._shuffled(self._kinds)
        kind = self._next.pop(0)
        self.events.append(getattr(kind, "__name__", ""))
        await kind()

    def _outage_s(self) -> float:
        return self._dice.uniform(2.0, 25.0)

    async def rendezvous_stands(self) -> None:
        leader = await self._witness.leader()
        if leader is None:
            return
        pids = pids_of(leader["metadata"]["uid"])
        self._witness.stopped.add("rendezvous")
        send(pids, signal.SIGSTOP)
        try:
            await asyncio.sleep(self._outage_s())
        finally:
            send(pids, signal.SIGCONT)
            self._witness.stopped.discard("rendezvous")

    async def operator_stands(self) -> None:
        self._witness.stopped.add("operator")
        send([self._pid()], signal.SIGSTOP)
        try:
            await asyncio.sleep(self._outage_s())
        finally:
            send([self._pid()], signal.SIGCONT)
            await self._operator_is_back()

    async def both_stand(self) -> None:
        await asyncio.gather(self.rendezvous_stands(), self.operator_stands())

    async def operator_killed(self) -> None:
        self._witness.stopped.add("operator")
        send([self._pid()], signal.SIGKILL)
        await asyncio.sleep(self._outage_s())
        await self._operator_is_back()

    async def rendezvous_deleted(self) -> None:
        leader = await self._witness.leader()
        if leader is not None:
            await self._bench.cluster.kubectl("delete", "pod", leader["metadata"]["name"], "-n", NAME, "--wait=false")
        await asyncio.sleep(self._dice.uniform(2.0, 5.0))

    async def worker_killed(self) -> None:
        pids = workers({pod["metadata"]["uid"] for pod in await self._witness.pods()})
        send(pids[:1], signal.SIGKILL)
        await asyncio.sleep(self._dice.uniform(2.0, 5.0))

    async def node_cordoned(self) -> None:
        leader = await self._witness.leader()
        if leader is None:
            return
        node = leader["spec"]["nodeName"]
        await self._bench.cluster.kubectl("cordon", node)
        await asyncio.sleep(self._outage_s())
        await self._bench.cluster.kubectl("uncordon", node)

    async def node_fails(self) -> None:
        """The machine of some pod is off, and on again: maybe before anybody has noticed."""
        if node := await self._a_node():
            await self._bench.cluster.fail_node(node)
            await self._is_back(node)

    async def node_falls_silent(self) -> None:
        """A kubelet hangs: its node is NotReady in time, and what it runs goes on."""
        if node := await self._a_node():
            await self._bench.cluster.silence_node(node)
            await self._is_back(node)

    async def _is_back(self, node: str) -> None:
        try:
            await asyncio.sleep(self._outage_s())
        finally:
            await self._bench.cluster.recover_node(node)

    async def _a_node(self) -> str:
        nodes = sorted({pod["spec"].get("nodeName", "") for pod in await self._witness.pods()} - {""})
        return self._dice.choice(nodes) if nodes else ""

    def _pid(self) -> int:
        process = self._operator._process
        assert process is not None
        return process.pid

    async def _operator_is_back(self) -> None:
        """An operator that was away for longer than its Lease ends, and is started again as by its kubelet."""
        await asyncio.sleep(0.5)
        if not self._operator.is_running:
            self._operator.start()
        self._witness.stopped.discard("operator")

    async def mend(self) -> None:
        """See to it that an operator runs: one that has lost its Lease ended by itself."""
        if not self._operator.is_running:
            self._operator.start()


@pytest.mark.timeout(SECONDS + 400)
@pytest.mark.parametrize("bench", ["local", FULL, MODERN], indirect=True)
def test_no_surface_says_for_long_what_is_not_so(bench: Bench) -> None:
    async def scenario() -> None:
        boxes = {
            "softSeconds": 4,
            "hardSeconds": 6,
            "barrierSeconds": 60,
            "startupSeconds": 120,
            "heartbeatSeconds": int(HEARTBEAT_S),
        }
        rungs = {"rungs": [{"name": "process", "limit": 99}, {"name": "pod", "limit": 99}]}
        document = job(NAME, ["sleep", "6000"], replicas=NUM_RANKS, restart=rungs, timeouts=boxes)
        ledger, stop = Ledger(), asyncio.Event()
        access = read_kubeconfig(bench.cluster.kubeconfig)
        async with bench.namespace(NAME), leased_operator(bench) as operator, KubeClient(access) as client:
            witness = Witness(bench, client, NAME)
            trouble = Trouble(bench, witness, operator, random.Random(SEED))
            await bench.apply(NAME, document)
            await bench.wait_training(NAME)
            watching = asyncio.create_task(watch(witness, ledger, stop))
            until_s = time.monotonic() + SECONDS
            # On a busy machine a look takes long: too few of them would show nothing.
            while time.monotonic() < until_s or (ledger.num_clear < NUM_LOOKS and time.monotonic() < until_s + 120.0):
                await trouble.happen()
                await trouble.mend()
                await asyncio.sleep(trouble._dice.uniform(1.0, 8.0))
            await trouble.mend()

            async def is_well() -> bool:
                try:
                    facts, words = await witness.look()
                except ApiError:
                    return False
                return facts.num_workers == NUM_RANKS and words.state == "Running" and words.text.startswith("TRAINING")

            await eventually(is_well, "a job that trains and is said to", pause_s=KUBECTL_PAUSE_S)
            stop.set()
            await watching
        print(f"seed {SEED}: {', '.join(trouble.events)}\n{ledger.table()}")
        late = {lie: age_s for lie, age_s in ledger.longest_s.items() if age_s > LIE_S}
        assert not late, f"seed {SEED}: {trouble.events}\n{ledger.table()}"
        assert ledger.num_clear >= NUM_LOOKS, ledger.table()

    asyncio.run(scenario())


def test_the_ledger_finds_a_lie_and_counts_no_time_without_a_processor() -> None:
    says = Words("Running", "True", "True", 2, "TRAINING, iteration 0", "Running", "", "Running")
    ledger = Ledger()
    for _ in range(20):
        ledger.look(Facts(True, False, 2, 2), says, 1.0)
    assert ledger.longest_s["column State: trains, without a rendezvous"] == 19.0
    assert "metric unbroken_job_state: trains, without a rendezvous" in ledger.table()
    for facts in (Facts(None, False, 2, 2), Facts(True, None, 0, 2)):
        starved = Ledger()
        for _ in range(20):
            starved.look(facts, says, 1.0)
        assert starved.longest_s == {}
    gone = Ledger()
    for _ in range(3):
        gone.look(Facts(False, True, 2, 0), says, 1.0)
    assert set(gone.longest_s) == {
        "unbroken status: trains, without an operator",
        "unbroken status -o json: trains, without an operator",
    }
    off = Ledger()
    for _ in range(3):
        off.look(Facts(True, True, 2, 1), says, 1.0)
    assert off.longest_s == {"condition PodsReady: all run, though one does not": 2.0}
    fewer = Ledger()
    for state in ("Running", "Recovering"):
        fewer.look(Facts(True, True, 1, 2), dataclasses.replace(says, state=state), 1.0)
    assert set(fewer.longest_s) == {"column Active: more than there are"}
    assert fewer.since_s == {}
    well = Ledger()
    well.look(Facts(True, True, 2, 2), says, 1.0)
    assert (well.longest_s, json.dumps(sorted(well.states))) == ({}, '["Running"]')
