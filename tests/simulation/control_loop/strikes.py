"""Faults of the cluster, of the control plane and of the job, each of which looks for its victim when it strikes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulation import schedule as job_faults
from tests.simulation.control_loop.api_server import ApiError, JsonObject
from tests.simulation.control_loop.names import JOB, PODS, SECRETS, SERVICES
from tests.simulation.schedule import FaultPlan

from unbroken_core.protocol.messages import Observation
from unbroken_operator.api import layout

if TYPE_CHECKING:
    from tests.simulation.control_loop.loop_world import ControlLoopWorld
    from tests.simulation.control_loop.machines import Machine

Strike = Callable[["ControlLoopWorld", float, float], None]
ON_CALLS = frozenset(("lost answer", "late write", "server error", "too many requests", "conflict"))
"""They wait for the next calls, which count: an answer that nobody has asked for is not lost."""


def strike_of(rng: random.Random, name: str, at_s: float) -> FaultPlan:
    """Return a fault with its chance."""
    pick, depth = rng.random(), rng.random()

    def strike(world: Any) -> None:
        if world.ended_at_s is not None:
            return
        before = world.num_told
        STRIKES[name](world, pick, depth)
        if name not in ON_CALLS and world.num_told > before:
            world.note_strike(name)  # Else it has found nothing to strike at.

    return FaultPlan(at_s, f"** {name}", strike)


# ---------------------------------------------------------------------------------------------------------- the network


def _arm(kind: str, most: int) -> Strike:
    def strike(world: ControlLoopWorld, _pick: float, depth: float) -> None:
        world.network.armed[kind] = world.network.armed.get(kind, 0) + 1 + int(depth * most)

    return strike


def _api_down(world: ControlLoopWorld, pick: float, depth: float) -> None:
    if not world.network.is_down:
        if pick < 0.3:
            world.api.forget_history()
        world.tell("the API server is away")
        world.network.go_down(depth * depth * 60.0 + 0.1)


def _compact(world: ControlLoopWorld, _pick: float, _depth: float) -> None:
    world.tell("history is gone")
    world.api.forget_history()
    world.network.break_watches()


def _break_watches(world: ControlLoopWorld, _pick: float, _depth: float) -> None:
    world.tell("watches break")
    world.network.break_watches()


def _slow_api(world: ControlLoopWorld, _pick: float, depth: float) -> None:
    world.tell("the API server is slow")
    world.network.slow_until_s = max(world.network.slow_until_s, world.now_s + depth * 20.0)


def _lag(world: ControlLoopWorld, pick: float, depth: float) -> None:
    kind = ("pods", "nodes", "services", "resilienttrainingjobs")[int(pick * 4)]
    world.tell(f"watches of {kind} lag")
    world.network.lag_until[kind] = (world.now_s + 20.0, depth * 10.0)


def _quota(world: ControlLoopWorld, _pick: float, depth: float) -> None:
    world.tell("no pod may be made")
    world.holds.quota_until_s = max(world.holds.quota_until_s, world.now_s + depth * 30.0)


# --------------------------------------------------------------------------------------------------------- the operator


def _crash_operator(world: ControlLoopWorld, pick: float, _depth: float) -> None:
    processes = world.operators.processes
    leader = world.operators.leader
    if processes:
        process = leader if leader is not None and pick < 0.8 else processes[int(pick * len(processes))]
        world.tell(f"{process.identity} ends")
        world.operators.crash(process)


def _pause_operator(world: ControlLoopWorld, _pick: float, depth: float) -> None:
    process = world.operators.leader
    if process is not None and not process.loop.is_paused:
        world.tell(f"{process.identity} pauses")
        process.loop.pause()
        world.after(depth * 40.0, process.loop.go_on, f"{process.identity} goes on")


def _cut_operator(world: ControlLoopWorld, _pick: float, depth: float) -> None:
    process = world.operators.leader
    if process is not None:
        world.tell(f"{process.identity} is cut off")
        world.operators.cut_off(process, depth * 40.0)


def _deafen_operator(world: ControlLoopWorld, _pick: float, depth: float) -> None:
    process = world.operators.leader
    if process is not None and not process.is_deaf:
        process.is_deaf = True
        world.tell(f"{process.identity} reaches no rendezvous")

        def mend() -> None:
            process.is_deaf = False

        world.after(depth * 40.0, mend, f"{process.identity} reaches the rendezvous again")


# --------------------------------------------------------------------------------------------------------- the machines


def _machine(world: ControlLoopWorld, pick: float, *, wants_used: bool = True) -> Machine | None:
    found = [machine for machine in world.machines.by_name.values() if machine.is_heard]
    used = [machine for machine in found if machine.containers]
    chosen = used if wants_used and used else found
    return chosen[int(pick * len(chosen))] if chosen else None


def _power_off(world: ControlLoopWorld, pick: float, depth: float) -> None:
    machine = _machine(world, pick)
    if machine is None:
        return
    world.tell(f"{machine.name} is off")
    world.machines.power_off(machine)
    if depth < 0.5:
        world.after(2.0 + depth * 160.0, lambda: world.machines.recover(machine), f"{machine.name} is on again")
        return

    def replace() -> None:
        world.machines.remove(machine)
        world.machines.add(has_gpu=machine.has_gpu)

    world.after(10.0 + depth * 100.0, replace, f"{machine.name} is replaced")


def _partition(world: ControlLoopWorld, pick: float, depth: float) -> None:
    """Cut a machine off: from the API server, and in half of the cases from all others, too."""
    machine = _machine(world, pick)
    if machine is None:
        return
    world.tell(f"{machine.name} is cut off")
    machine.is_reachable = False
    world.machines.lose(machine)
    is_whole = depth < 0.5
    if is_whole:
        _isolate(world, machine, is_on=True)

    def mend() -> None:
        if is_whole:
            _isolate(world, machine, is_on=False)
        world.machines.recover(machine)

    world.after(1.0 + (2 * depth % 1.0) ** 2 * 200.0, mend, f"{machine.name} is reachable again")


def _isolate(world: ControlLoopWorld, machine: Machine, *, is_on: bool) -> None:
    for container in machine.containers.values():
        pod = world.pods.get(container.uid)
        if pod is not None and is_on and pod.is_alive:
            world.guilty_pods.add(pod.uid)
            pod.cut_off("both")
        elif pod is not None and not is_on:
            world.guilty_pods.add(pod.uid)  # Also one that came while its machine was cut off: its connection breaks.
            pod.mend()
        world.rendezvous.isolate(container.uid, is_on=is_on)


def _cordon(world: ControlLoopWorld, pick: float, depth: float) -> None:
    machine = _machine(world, pick)
    if machine is None or world.machines.is_cordoned(machine):
        return
    world.tell(f"{machine.name} is cordoned")
    for uid in machine.containers:
        world.guilty_pods.add(uid)
    world.machines.cordon(machine, is_on=True)
    world.after(1.0 + depth * 90.0, lambda: world.machines.cordon(machine, is_on=False), f"{machine.name} is free")


# ------------------------------------------------------------------------------------------------------ hands of others


def _pods(world: ControlLoopWorld, component: str) -> list[JsonObject]:
    return [
        item
        for item in world.api.items(PODS)
        if (item["metadata"].get("annotations") or {}).get(layout.JOB_UID_ANNOTATION) == world.job_uid
        if (item["metadata"].get("labels") or {}).get(layout.COMPONENT_LABEL) == component
    ]


def _delete(component: str, *, is_forced: bool = False) -> Strike:
    def strike(world: ControlLoopWorld, pick: float, _depth: float) -> None:
        items = _pods(world, component)
        if items:
            item = items[int(pick * len(items))]
            world.tell(f"somebody deletes {item['metadata']['name']}")
            world.guilty_pods.add(item["metadata"]["uid"])
            world.api.delete(f"{PODS}/{item['metadata']['name']}", is_forced=is_forced)

    return strike


def _delete_object(collection: str, name: str) -> Strike:
    def strike(world: ControlLoopWorld, _pick: float, _depth: float) -> None:
        try:
            world.api.delete(f"{collection}/{name}")
            world.tell(f"somebody deletes {name}")
        except ApiError:
            return

    return strike


def _relabel(world: ControlLoopWorld, pick: float, depth: float) -> None:
    """Change a label of a pod, or take it away."""
    items = _pods(world, layout.TRAINER)
    if items:
        name = items[int(pick * len(items))]["metadata"]["name"]
        world.tell(f"somebody relabels {name}")
        key = (layout.COMPONENT_LABEL, layout.ROLE_LABEL)[int(depth * 2)]
        world.api.merge(f"{PODS}/{name}", {"metadata": {"labels": {key: "mine" if pick < 0.5 else None}}})


def _disown(world: ControlLoopWorld, pick: float, _depth: float) -> None:
    items = _pods(world, layout.TRAINER)
    if items:
        name = items[int(pick * len(items))]["metadata"]["name"]
        world.tell(f"somebody disowns {name}")
        world.api.merge(f"{PODS}/{name}", {"metadata": {"ownerReferences": None}})


# -------------------------------------------------------------------------------------------------------------- the job


def _crash_rendezvous(world: ControlLoopWorld, _pick: float, depth: float) -> None:
    if world.rendezvous.leader is not None:
        world.tell("the rendezvous ends")
    world.crash_coordinator(0.2 + depth * depth * 20.0)


def _old_observation(world: ControlLoopWorld, _pick: float, _depth: float) -> None:
    """Let the last Observation arrive once more."""
    last: Observation | None = world.holds.last_observation
    if last is not None and world.coordinator is not None:
        world.take_observation(last)


def mend_all(world: Any) -> None:
    """Let everything be well from now on."""
    network = world.network
    network.weather, network.armed, network.slow_until_s = 0.0, {}, 0.0
    network.lag_until.clear()
    world.holds.quota_until_s = 0.0
    world.holds.calm_since_s = world.now_s


STRIKES: dict[str, Strike] = {
    "lost answer": _arm("lost", 4),
    "late write": _arm("late", 3),
    "server error": _arm("5xx", 6),
    "too many requests": _arm("429", 4),
    "conflict": _arm("conflict", 3),
    "API server down": _api_down,
    "history gone": _compact,
    "watches break": _break_watches,
    "slow API server": _slow_api,
    "watch lags": _lag,
    "quota": _quota,
    "operator ends": _crash_operator,
    "operator pauses": _pause_operator,
    "operator cut off": _cut_operator,
    "operator deaf": _deafen_operator,
    "power off": _power_off,
    "partition": _partition,
    "cordon": _cordon,
    "delete pod": _delete(layout.TRAINER),
    "delete pod by force": _delete(layout.TRAINER, is_forced=True),
    "delete rendezvous": _delete(layout.RENDEZVOUS),
    "delete standby": _delete(layout.STANDBY),
    "delete service": _delete_object(SERVICES, layout.rendezvous_name(JOB)),
    "delete secret": _delete_object(SECRETS, layout.rendezvous_name(JOB)),
    "delete tokens": _delete_object(SECRETS, layout.tokens_name(JOB, 0)),
    "relabel": _relabel,
    "disown": _disown,
    "rendezvous ends": _crash_rendezvous,
    "exception": job_faults._exception,
    "kill": job_faults._kill,
    "kill rank 0": job_faults._kill_rank_0,
    "hang": job_faults._hang,
    "slow": job_faults._slow,
    "lose pod": job_faults._lose_pod,
    "restart agent": job_faults._restart_agent,
    "cut off": job_faults._cut,
}
RANDOM_STRIKES = tuple(sorted(STRIKES))
