"""Nodes, their kubelets, the scheduler, and the controllers of Kubernetes that tell of nodes and end what they had.

API server ──a pod without node──> scheduler ──node──> kubelet ──processes──> World's pods, rendezvous
    ^                                                     │
    └──────────────── status, and in the end the removal ─┘   only while its machine is up and reaches the server
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.control_loop.api_server import Change, JsonObject
from tests.simulation.control_loop.names import NODES, PODS, RACK, SECRETS

from unbroken_operator.api import layout

if TYPE_CHECKING:
    from tests.simulation.control_loop.loop_world import ControlLoopWorld

NOT_READY_S = 40.0
EVICT_S = 300.0
UNSCHEDULABLE_S = 2.0


@dataclass
class Container:
    """What runs of one pod, as its kubelet knows it."""

    name: str
    uid: str
    ip: str
    component: str
    is_running: bool = False
    is_ending: bool = False
    exit_code: int | None = None
    """Of the user's container, once it has ended for good."""
    num_restarts: int = 0
    is_ready: bool = False
    told: JsonObject = field(default_factory=dict)


@dataclass
class Machine:
    """The truth about one node."""

    name: str
    rack: str
    has_gpu: bool
    is_up: bool = True
    is_reachable: bool = True
    """Whether its kubelet reaches the API server."""
    silent_since_s: float | None = None
    containers: dict[str, Container] = field(default_factory=dict)
    """By uid of the pod."""

    @property
    def is_heard(self) -> bool:
        """Whether the API server hears of it."""
        return self.is_up and self.is_reachable


class Machines:
    """All of them."""

    def __init__(self, world: ControlLoopWorld, num_gpu: int, num_racks: int) -> None:
        self.world = world
        self.random = random.Random(f"machines {world.schedule.seed}")
        self.by_name: dict[str, Machine] = {}
        self.num_racks = num_racks
        self._num_ips = 0
        self._num_names = 0
        self.slow_start_s = self.random.choice([0.0, 0.0, 5.0, 30.0])
        for _number in range(num_gpu):
            self.add(has_gpu=True)
        for _number in range(2):
            self.add(has_gpu=False)
        world.api.watchers.append(self._on_change)

    # ----------------------------------------------------------------------------------------------------------- nodes

    def add(self, *, has_gpu: bool) -> Machine:
        """Let another node join."""
        number = self._num_names
        self._num_names += 1
        kind = "gpu" if has_gpu else "cpu"
        machine = Machine(f"{kind}-{number}", f"rack-{number % self.num_racks}", has_gpu)
        self.by_name[machine.name] = machine
        self.world.api.create(
            NODES,
            {
                "metadata": {
                    "name": machine.name,
                    "labels": {RACK: machine.rack, layout.HOSTNAME_LABEL: machine.name},
                },
                "spec": {},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            },
        )
        self._schedule_soon()
        return machine

    def cordon(self, machine: Machine, *, is_on: bool) -> None:
        """Let nothing new run there."""
        if self._node(machine) is not None:
            self.world.api.merge(f"{NODES}/{machine.name}", {"spec": {"unschedulable": is_on or None}})
            if not is_on:
                self._schedule_soon()

    def is_cordoned(self, machine: Machine) -> bool:
        """Whether nothing new runs there."""
        node = self._node(machine)
        return node is not None and bool(node["spec"].get("unschedulable"))

    def power_off(self, machine: Machine) -> None:
        """End all that runs there; nobody closes a connection."""
        machine.is_up = False
        for container in list(machine.containers.values()):
            self._kill(container, is_silent=True)
        self.lose(machine)

    def lose(self, machine: Machine) -> None:
        """Let its silence be noticed, some time later."""
        if machine.silent_since_s is not None:
            return
        machine.silent_since_s = since = self.world.now_s

        def judge() -> None:
            if machine.silent_since_s == since and self._node(machine) is not None:
                self._set_ready(machine, "Unknown")

        def evict() -> None:
            if machine.silent_since_s != since:
                return
            for item in self._pods_of(machine):
                self.world.api.delete(f"{PODS}/{item['metadata']['name']}")

        self.world.after(NOT_READY_S + self.random.uniform(0.0, 5.0), judge, "")
        self.world.after(NOT_READY_S + EVICT_S, evict, "")

    def recover(self, machine: Machine) -> None:
        """Let it be there again, after a reboot if it was off."""
        if self._node(machine) is None:
            return
        machine.is_up = machine.is_reachable = True
        machine.silent_since_s = None

        def heard() -> None:
            if not machine.is_heard or self._node(machine) is None:
                return
            self._set_ready(machine, "True")
            for item in self._pods_of(machine):
                self._begin_again(machine, item)
                self._sync(machine, item["metadata"]["name"])
            for uid in list(machine.containers):
                self._sync(machine, machine.containers[uid].name)
            self._schedule_soon()

        self.world.after(self.random.uniform(0.1, 3.0), heard, "")

    def _begin_again(self, machine: Machine, item: JsonObject) -> None:
        """Start a container again whose pod says that it always runs."""
        known = machine.containers.get(item["metadata"]["uid"])
        if known is None or known.is_running or known.is_ending:
            return
        if known.exit_code is None or item["spec"].get("restartPolicy") == "Always":
            known.exit_code = None
            self._start_later(machine, known, item, self.random.uniform(0.5, 3.0))

    def remove(self, machine: Machine) -> None:
        """Let the cloud's controller delete the Node of a machine that is off; its pods follow."""
        if machine.is_up or self._node(machine) is None:
            return
        self.world.api.delete(f"{NODES}/{machine.name}")

        def collect() -> None:
            for item in self._pods_of(machine):
                self.world.api.delete(f"{PODS}/{item['metadata']['name']}", is_forced=True)

        self.world.after(self.random.uniform(1.0, 40.0), collect, "")

    def _set_ready(self, machine: Machine, word: str) -> None:
        node = self._node(machine)
        if node is not None:
            conditions = [{"type": "Ready", "status": word}]
            taints = None if word == "True" else [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]
            self.world.api.merge(f"{NODES}/{machine.name}", {"spec": {"taints": taints}})
            self.world.api.merge(f"{NODES}/{machine.name}/status", {"status": {"conditions": conditions}})

    def _node(self, machine: Machine) -> JsonObject | None:
        return self.world.api.objects.get(NODES, {}).get(machine.name)

    def is_ready(self, machine: Machine) -> bool:
        """Whether the API server says so."""
        node = self._node(machine)
        return node is not None and node["status"]["conditions"][0]["status"] == "True"

    # ------------------------------------------------------------------------------------------------------- scheduler

    def _schedule_soon(self) -> None:
        self.world.after(self.random.uniform(0.01, 0.4), self._schedule, "")

    def _schedule(self) -> None:
        if self.world.network.is_down:
            self.world.after(1.0, self._schedule, "")
            return
        for item in self.world.api.items(PODS):
            if not item["spec"].get("nodeName") and not item["metadata"].get("deletionTimestamp"):
                self._place(item)

    def _place(self, item: JsonObject) -> None:
        name = item["metadata"]["name"]
        annotations = item["metadata"].get("annotations") or {}
        avoided = set((annotations.get(layout.AVOIDS_ANNOTATION) or "").split(","))
        wants_gpu = layout.TEMPLATE_ANNOTATION in annotations
        free = [
            machine
            for machine in self.by_name.values()
            if self._may_run(machine, wants_gpu=wants_gpu) and machine.name not in avoided
        ]
        if free:
            machine = self.random.choice(free)
            placed = [{"type": "PodScheduled", "status": "True"}]
            self.world.api.merge(f"{PODS}/{name}", {"spec": {"nodeName": machine.name}})
            self.world.api.merge(f"{PODS}/{name}/status", {"status": {"conditions": placed}})
        elif not item["status"].get("conditions"):
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0 nodes are free"}
            self.world.api.merge(f"{PODS}/{name}/status", {"status": {"conditions": [why]}})

    def _may_run(self, machine: Machine, *, wants_gpu: bool) -> bool:
        if not self.is_ready(machine) or self.is_cordoned(machine) or machine.has_gpu != wants_gpu:
            return False
        return not wants_gpu or not any(
            item["status"].get("phase") not in ("Failed", "Succeeded") for item in self._pods_of(machine)
        )

    def _pods_of(self, machine: Machine) -> list[JsonObject]:
        return [item for item in self.world.api.items(PODS) if item["spec"].get("nodeName") == machine.name]

    # --------------------------------------------------------------------------------------------------------- kubelet

    def _on_change(self, collection: str, change: Change) -> None:
        if collection != PODS:
            return
        item = change.item
        machine = self.by_name.get(item["spec"].get("nodeName") or "")
        if machine is None:
            if change.type == "ADDED":
                self._schedule_soon()
            return
        if change.type == "DELETED" or item["status"].get("phase") in ("Failed", "Succeeded"):
            self._schedule_soon()
        name = item["metadata"]["name"]
        self.world.after(self.random.uniform(0.01, 0.3), lambda: self._sync(machine, name), "")

    def _sync(self, machine: Machine, name: str) -> None:
        """Let a kubelet bring what runs in line with what is stored."""
        if not machine.is_heard:
            return
        if self.world.network.is_down:
            self.world.after(1.0, lambda: self._sync(machine, name), "")
            return
        item = self.world.api.objects.get(PODS, {}).get(name)
        for container in [held for held in machine.containers.values() if held.name == name]:
            if item is None or item["metadata"]["uid"] != container.uid:
                self._kill(container, is_silent=False)
                self._drop(machine, container.uid)
        if item is None or item["spec"].get("nodeName") != machine.name:
            return
        known = machine.containers.get(item["metadata"]["uid"])
        if known is None:
            self._take_up(machine, item)
        elif item["metadata"].get("deletionTimestamp"):
            self._end(machine, known)
        else:
            self._tell(machine, known)

    def _take_up(self, machine: Machine, item: JsonObject) -> None:
        metadata = item["metadata"]
        if metadata.get("deletionTimestamp"):
            self._finish(machine, metadata["name"], metadata["uid"])
            return
        if item["status"].get("phase") in ("Failed", "Succeeded"):
            return
        self._num_ips += 1
        is_trainer = layout.TEMPLATE_ANNOTATION in (metadata.get("annotations") or {})
        ip = f"10.0.{self._num_ips // 250}.{self._num_ips % 250 + 1}"
        component = layout.TRAINER if is_trainer else layout.RENDEZVOUS
        container = Container(metadata["name"], metadata["uid"], ip, component)
        machine.containers[container.uid] = container
        self._start_later(machine, container, item, self.random.uniform(0.2, 2.0 + self.slow_start_s))

    def _start_later(self, machine: Machine, container: Container, item: JsonObject, delay_s: float) -> None:
        def start() -> None:
            is_there = machine.is_up and machine.containers.get(container.uid) is container
            if not is_there or container.is_running or container.is_ending or container.exit_code is not None:
                return
            wanted = [volume["secret"]["secretName"] for volume in item["spec"]["volumes"] if "secret" in volume]
            if any(name not in self.world.api.objects.get(SECRETS, {}) for name in wanted):
                self._start_later(machine, container, item, 2.0)  # It waits for what it mounts.
                return
            container.is_running = True
            self.world.begin_container(machine, container, item)
            self._tell(machine, container)

        self.world.after(delay_s, start, "")

    def _end(self, machine: Machine, container: Container) -> None:
        """End a pod with its grace."""
        if container.is_ending and container.is_running:
            return
        # One that has ended while its node was cut off is removed now.
        container.is_ending = True
        if container.is_running:
            self.world.end_container(container)
        else:
            self._finish(machine, container.name, container.uid)

    def _kill(self, container: Container, *, is_silent: bool) -> None:
        if container.is_running:
            container.is_running, container.exit_code = False, 137
            self.world.kill_container(container, is_silent=is_silent)

    def _drop(self, machine: Machine, uid: str) -> None:
        machine.containers.pop(uid, None)
        self.world.rendezvous.stop(uid, is_for_good=True)

    def ended(self, uid: str, exit_code: int) -> None:
        """Take in that a pod's containers have ended for good."""
        for machine in self.by_name.values():
            container = machine.containers.get(uid)
            if container is None or not container.is_running:
                continue
            container.is_running, container.exit_code, container.is_ready = False, exit_code, False
            if machine.is_up:
                self._tell_soon(machine, container)

    def readiness(self, uid: str, *, is_ready: bool, num_restarts: int) -> None:
        """Take in what the probes say."""
        for machine in self.by_name.values():
            container = machine.containers.get(uid)
            if container is not None:
                container.is_ready, container.num_restarts = is_ready, num_restarts
                self._tell_soon(machine, container)

    def _tell_soon(self, machine: Machine, container: Container) -> None:
        self.world.after(self.random.uniform(0.05, 1.0), lambda: self._tell(machine, container), "")

    def _tell(self, machine: Machine, container: Container) -> None:
        """Write a pod's status; remove a pod that has ended as it should."""
        if not machine.is_heard or machine.containers.get(container.uid) is not container:
            return
        if self.world.network.is_down:
            self.world.after(1.0, lambda: self._tell(machine, container), "")
            return
        if container.is_running or container.exit_code is not None:
            self.world.api.put_status(f"{PODS}/{container.name}", container.uid, _status(container))
        item = self.world.api.objects.get(PODS, {}).get(container.name)
        is_same = item is not None and item["metadata"]["uid"] == container.uid
        if is_same and item is not None and item["metadata"].get("deletionTimestamp") and not container.is_running:
            self._finish(machine, container.name, container.uid)

    def _finish(self, machine: Machine, name: str, uid: str) -> None:
        def remove() -> None:
            if not machine.is_heard:
                return
            if self.world.network.is_down:
                self.world.after(1.0, remove, "")
                return
            item = self.world.api.objects.get(PODS, {}).get(name)
            if item is not None and item["metadata"]["uid"] == uid:
                self.world.api.delete(f"{PODS}/{name}", is_forced=True)
            self._drop(machine, uid)

        self.world.after(self.random.uniform(0.05, 0.5), remove, "")


def _status(container: Container) -> JsonObject:
    is_trainer = container.component == layout.TRAINER
    if container.exit_code is None:
        state: dict[str, Any] = {"running": {}}
        phase = "Running"
    else:
        state = {"terminated": {"exitCode": container.exit_code}}
        phase = "Succeeded" if container.exit_code == 0 else "Failed"
    own = {"name": "trainer" if is_trainer else layout.RENDEZVOUS, "state": state}
    status: dict[str, Any] = {
        "phase": phase,
        "podIP": container.ip,
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if container.is_ready and container.exit_code is None else "False"},
        ],
        "containerStatuses": [{**own, "restartCount": container.num_restarts}],
    }
    if is_trainer:
        agent = {"name": layout.AGENT_CONTAINER, "state": state, "restartCount": 0}
        status["initContainerStatuses"] = [agent]
    return status
