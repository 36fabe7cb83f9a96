"""Cluster, API server, operators, rendezvous, agents and workers of one job, together in virtual time, from a seed.

The base world has agents, workers and the coordinator with what must hold of them. Here pods come and go as the
operator asks for them: its own code runs, and only what it talks to is modelled.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from tests.simulation.control_loop.api_server import ApiServer, JsonObject
from tests.simulation.control_loop.holds import Holds
from tests.simulation.control_loop.loop_schedule import LoopSchedule
from tests.simulation.control_loop.machines import Container, Machine, Machines
from tests.simulation.control_loop.names import JOB_PATH, JOBS, PODS, SERVICES
from tests.simulation.control_loop.network import Network
from tests.simulation.control_loop.operators import OperatorProcess, Operators
from tests.simulation.control_loop.rendezvous import RendezvousPods, RendezvousProcess
from tests.simulation.control_loop.virtual_time import virtual_time, wall_text
from tests.simulation.invariants import Violation
from tests.simulation.pod import Pod
from tests.simulation.schedule import FaultPlan
from tests.simulation.world import OVER, Connection, World

from unbroken.rendezvous.restored_state import uses_on_clock
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import Event, Observed
from unbroken_core.protocol.messages import JobStatus, Observation
from unbroken_core.protocol.wire import settings_from_json
from unbroken_core.ranks.rules import Rules
from unbroken_core.vocabulary.reasons import JobPhase, Role, WorkerPhase
from unbroken_operator.api import layout

MAX_STEPS = 400_000
AFTERMATH_S = 30.0
"""So long the world goes on after the job's end: what ended then is cleaned up."""


class LoopPod(Pod):
    """A training pod whose kubelet sees its end."""

    def _end_workers(self) -> None:
        super()._end_workers()
        if self.is_done and self.is_alive:
            assert isinstance(self.world, ControlLoopWorld)
            self.world.finish_trainer(self)


class ControlLoopWorld(World):
    """One job in a cluster with its faults."""

    def __init__(self, schedule: LoopSchedule) -> None:
        self.plan_of_faults = schedule
        self.is_over = False
        self.num_told = 0
        super().__init__(schedule.job)
        self.is_thorough = schedule.job.seed % 8 == 0
        self.coordinator = None
        self.caller: OperatorProcess | None = None
        """Who makes the call that takes effect now; None: somebody else."""
        self.strikes: Counter[str] = Counter()
        self.accusations: list[str] = []
        self.final_phase: JobPhase | None = None
        self.final_status: JobStatus | None = None
        self.forgot = 0
        """How often a rendezvous began with less than the one before had known."""
        self.lost_in_ending = False
        self.api = ApiServer(lambda: wall_text(self.now_s)[:19] + "Z")
        self.holds = Holds(self)
        self.network = Network(self, self.api)
        self.network.weather = schedule.weather
        self.machines = Machines(self, schedule.num_gpu_nodes, schedule.job.num_racks)
        self.rendezvous = RendezvousPods(self)
        self.api.objects.setdefault(PODS, {})
        self.api.create(JOBS, schedule.job_object)
        self.job_uid = str(self.api.get(JOB_PATH)["metadata"]["uid"])
        for pod in schedule.strangers:
            self.api.create(PODS, pod)
        self.ended_at_s: float | None = None
        self.operators = Operators.__new__(Operators)

    # ------------------------------------------------------------------------------------------------------------ time

    def run(self) -> None:
        """Run until the job is over and cleaned up. Raises Violation."""
        chance = random.Random(f"operator {self.schedule.seed}")
        with virtual_time(lambda: self.now_s, chance, self.accuse):
            self.operators = Operators(self, self.plan_of_faults.num_operators)
            try:
                self._run_all()
            finally:
                self.is_over = True
                self.operators.end()
        self.holds.check_end()

    def _run_all(self) -> None:
        from heapq import heappop

        timers = self._timers
        self._drain()
        while timers:
            self.now_s, _number, action, text = heappop(timers)
            if text:
                self.tell(text)
            action()
            self._drain()
            self.num_events += 1
            if self.accusations:
                raise Violation(self.accusations[0])
            if self.num_events > MAX_STEPS:
                raise Violation(f"more than {MAX_STEPS} events: the job does not come to an end")
            if self.ended_at_s is not None and self.now_s > self.ended_at_s + AFTERMATH_S:
                return
            if self.now_s > self.schedule.limit_s:
                return

    def _drain(self) -> None:
        for process in tuple(self.operators.processes):
            process.loop.drain()
            if process.loop.errors:
                self.accuse(process.loop.errors[0])

    def accuse(self, text: str) -> None:
        """Note a violation where none can be raised: the operator's tasks would catch it."""
        self.accusations.append(text)

    def tell(self, text: str, thing: object = "") -> None:
        """Add a line to the story."""
        self.num_told += 1
        super().tell(text, thing)

    def note_strike(self, kind: str) -> None:
        """Count a fault that has struck."""
        self.strikes[kind] += 1
        self.num_faults += 1
        self.disturbed_s = self.now_s

    def _strike(self, fault: FaultPlan) -> None:
        self.disturbed_s = self.now_s
        fault.strike(self)

    @staticmethod
    def wall(at_s: float) -> str:
        """Return virtual seconds as a time of day."""
        return wall_text(at_s)

    # ------------------------------------------------------------------------------------- what the base world modelled

    def create_pod(self, role: Role, delay_s: float) -> None:
        """The operator makes pods here, and nobody else."""

    def _observe_soon(self) -> None:
        """The operator tells of pods here."""

    def pod_died(self, pod: Pod) -> None:
        """Let its kubelet see that its processes have ended."""
        self.guilty_pods.add(pod.uid)
        self.disturbed_s = self.now_s
        self.memory.pod_died(pod)
        self.tell(f"{pod.name} is gone")
        self.machines.ended(pod.uid, 137)

    def finish_trainer(self, pod: Pod) -> None:
        """Let a pod end whose agent and workers have done all they had to."""
        all_well = all(worker.has_ended for worker in pod.workers)
        if not all_well:
            self.guilty_pods.add(pod.uid)  # A worker of it was killed after the training, so it ends with an error.

        def end() -> None:
            if pod.is_alive:
                pod.is_alive = False
                for worker in pod.workers:
                    worker.phase = WorkerPhase.GONE  # Of a spare that was told to end, and got a rank meanwhile.
                if pod.connection is not None:
                    self.break_connection(pod.connection)
                self.machines.ended(pod.uid, 0 if all_well else 1)

        self.after(self.random.uniform(0.05, 1.5), end, f"{pod.name} has ended")

    # ------------------------------------------------------------------------------------------------------ containers

    def begin_container(self, machine: Machine, container: Container, item: JsonObject) -> None:
        """Start what runs in a pod."""
        if container.component == layout.RENDEZVOUS:
            self.rendezvous.begin(item, container.ip)
            return
        domains = tuple(machine.rack for _layer in self.settings.layers)
        pod = LoopPod(self, container.name, container.uid, machine.name, domains)
        self.holds.check_identity(pod)
        self.pods[pod.uid] = pod
        container.is_ready = True
        if not machine.is_reachable and not machine.is_up:
            pod.die(is_silent=True)
            return
        pod.connect()

    def end_container(self, container: Container) -> None:
        """Tell what runs in a pod to end."""
        if container.component == layout.TRAINER:
            pod = self.pods[container.uid]
            self.guilty_pods.add(pod.uid)
            if pod.is_alive:
                pod.leave()
            else:
                self.machines.ended(container.uid, 137)
            return

        def end() -> None:
            self.rendezvous.stop(container.uid, is_for_good=True)
            self.machines.ended(container.uid, 0)

        self.after(self.random.uniform(0.02, 2.0), end, f"{container.name} ends")

    def kill_container(self, container: Container, *, is_silent: bool) -> None:
        """End what runs in a pod at once."""
        if container.component == layout.TRAINER:
            pod = self.pods[container.uid]
            self.guilty_pods.add(pod.uid)
            pod.die(is_silent=is_silent)
        else:
            self.rendezvous.stop(container.uid, is_for_good=not is_silent)

    # ------------------------------------------------------------------------------------------------------ rendezvous

    def begin_coordinator(self, process: RendezvousProcess) -> None:
        """Let a rendezvous lead: with what its file and the operator know."""
        earlier = process.earlier
        term, iteration = process.kept
        used, highest = max(earlier.term, term), max(earlier.iteration, iteration)
        if (used, highest) < self.past or highest < self.past[1] or used < self.past[0]:
            self.forgot += 1
            # It may use numbers again: what nobody lives to tell is not told.
            from dataclasses import replace

            self.schedule = replace(self.schedule, has_memory=False)
        settings = settings_from_json(process.settings)
        if settings != self.settings:
            self.accuse(f"the rendezvous has other settings than the job: {settings} and {self.settings}")
        self.coordinator = Coordinator(settings, self.now_s, used + 1, highest, uses_on_clock(earlier, self.now_s))
        self.tell(f"{process.name} leads from term {used + 1} and iteration {highest} on")
        self.lacks_pods = True
        self.told_of.clear()
        self.ledger.forget()
        self._plan_tick()

    def end_coordinator(self) -> tuple[int, int]:
        """End the one that leads; return what it knew."""
        coordinator = self.coordinator
        if coordinator is None:
            return (0, -1)
        self.disturbed_s = self.now_s
        self.past = max(self.past[0], coordinator.past[0]), max(self.past[1], coordinator.past[1])
        if coordinator.phase is JobPhase.ENDING or self._has_returned():
            self.lost_in_ending = True
        self._note_over()
        self.coordinator = None
        self.epoch += 1
        self._tick_at_s = None
        self.break_all_connections()
        return coordinator.past

    def _has_returned(self) -> bool:
        return any(worker.has_completed for pod in self.pods.values() for worker in pod.workers)

    def break_all_connections(self) -> None:
        """Break what agents have to the rendezvous."""
        for name, connection in list(self.connections.items()):
            if connection.is_open:
                self.break_connection(name)

    def open_connection(self, pod: Pod) -> str | None:
        """Return the name of a new connection; None when the name leads nowhere, or nobody listens there."""
        if pod.is_muted or pod.one_way:
            return None
        leader = self.rendezvous.leader
        services = self.api.objects.get(SERVICES, {})
        backends = [] if not services else self._backends()
        if not backends:
            return None  # The name leads nowhere: that is no word of anybody.
        if leader is None or self.coordinator is None or leader.uid not in backends:
            reachable = [uid for uid in backends if self._is_refusing(uid)]
            if reachable:
                pod.refused()
            return None
        if leader.is_isolated:
            return None
        name = f"{pod.name}#{len(self.connections)}"
        self.connections[name] = Connection(pod, self.epoch)
        return name

    def _backends(self) -> list[str]:
        """Return the uids of the pods that the Service leads to."""
        return [
            item["metadata"]["uid"]
            for item in self.api.items(PODS)
            if (item["metadata"].get("labels") or {}).get(layout.COMPONENT_LABEL) == layout.RENDEZVOUS
            and item["status"].get("podIP")
            and item["status"].get("phase") == "Running"
        ]

    def _is_refusing(self, uid: str) -> bool:
        process = self.rendezvous.by_uid.get(uid)
        return process is not None and not process.is_isolated and not process.is_over

    def step(self, event: Event) -> None:
        """Let the coordinator take one event, and its listeners hear of it."""
        super().step(event)
        self._note_over()
        self.rendezvous.note_step()

    def _note_over(self) -> None:
        coordinator = self.coordinator
        if coordinator is not None and coordinator.phase in OVER and self.final_phase is None:
            self.final_phase = coordinator.phase
            self.final_status = coordinator.status(self.now_s, self.wall)
            self.ledger.check_end()

    def take_observation(self, observation: Observation) -> None:
        """Let the coordinator hear of the pods."""
        if self.coordinator is None:
            return
        self.holds.check_observation(observation)
        num_running = sum(pod.gone is None and not pod.is_waiting for pod in observation.pods.values())
        self.lacks_pods = num_running < Rules.of(self.settings).least_pods
        self.told_of.update(observation.pods)
        self.step(Observed(observation))

    def crash_coordinator(self, down_s: float) -> None:
        """The container of the rendezvous that leads ends, and is started again."""
        if self.rendezvous.leader is not None:
            self.rendezvous.crash(self.rendezvous.leader, down_s)

    def job_status(self) -> dict[str, Any]:
        """Return the stored status of the job."""
        job = self.api.objects.get(JOBS, {}).get("digits")
        return {} if job is None else job.get("status") or {}
