"""What must hold of cluster, operator and status together, beside what `invariants` says of the job's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.control_loop.api_server import Address, ApiError, Change, JsonObject
from tests.simulation.control_loop.names import JOBS, LEASES, NODES, PODS
from tests.simulation.invariants import Violation
from tests.simulation.pod import Pod

from unbroken_core.protocol.messages import Earlier, Observation
from unbroken_core.protocol.wire import decode
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, WorkerPhase
from unbroken_operator.adapters.informer import MAX_DELAY_S
from unbroken_operator.api import layout
from unbroken_operator.api.status_models import JobStateWord

if TYPE_CHECKING:
    from tests.simulation.control_loop.loop_world import ControlLoopWorld
    from tests.simulation.control_loop.rendezvous import RendezvousProcess

LOOK_S = 5.0
FALSE_CLAIM_S = 60.0
"""So long the stored status may say Running while no rank trains, an operator leads and all of it is reachable."""
SURPLUS_S = 90.0
UNRESERVED_S = 60.0
TRAINED_S = 30.0
"""Who has trained for so long is no spare in any report that is worth acting on."""
RECOVERED_S = 1500.0
"""After the last strike the job trains again within this, or is over."""
PODS_A_STRIKE = 3
WRITES_LATE_S = 15.0
"""So long after another operator took the lease may a write of the one before take effect: what is on its way."""
EXCUSED_S = 60.0
"""So long after a write came late, or a node came back, there may be more pods than were wanted."""
FAULTS_OF_WORKERS = ("exception", "hang", "kill", "kill rank 0", "lose pod", "power off", "cut off")
OVER_WORDS = (JobStateWord.COMPLETE.value, JobStateWord.FAILED.value)


class Holds:
    """Looks at every change of the API server, and at everything every few seconds."""

    def __init__(self, world: ControlLoopWorld) -> None:
        self.world = world
        self.quota_until_s = 0.0
        self.calm_since_s: float | None = None
        self.last_observation: Observation | None = None
        self.created: dict[str, str] = {}
        """Uid of every pod that was ever made of the job, by name."""
        self._ending: set[str] = set()
        """Uids of pods that somebody has told to end."""
        self.training_since: dict[str, float] = {}
        """Since when a pod trains without a break, by uid."""
        self._false_since_s: float | None = None
        self._surplus_since_s: float | None = None
        self._unreserved_since_s: float | None = None
        self._known_term = (0, 0.0)
        """The highest term in the status, and since when."""
        self.unready_at: dict[str, float] = {}
        """When a node was last not ready, or cordoned."""
        self.excused_until_s = 0.0
        self.holder = ("", 0.0)
        """Of the lease, and since when."""
        self.away_at_s = -EXCUSED_S
        """When a kubelet was last out of the API server's reach."""
        self.unsure_at_s = 0.0
        """When an operator was last known not to reach the rendezvous, or there was none."""
        world.api.watchers.append(self._on_change)
        world.api.on_create = self._before_creation
        world.after(LOOK_S, self._look, "")

    # -------------------------------------------------------------------------------------------------- the API server

    def _before_creation(self, where: Address, item: JsonObject) -> None:
        world = self.world
        if where.kind != "pods" or world.caller is None:
            return
        if world.now_s < self.quota_until_s:
            raise ApiError(403, f"pods {item['metadata']['name']!r} is forbidden: exceeded quota")
        name, uid = item["metadata"]["name"], item["metadata"]["uid"]
        if name in self.created:
            raise Violation(f"pod {name} was made before, as {self.created[name]}: its ordinal is used again")
        self.created[name] = uid
        most = self._num_wanted() + 1 + 5 + PODS_A_STRIKE * (world.num_faults + 1)
        if len(self.created) > most:
            raise Violation(f"{len(self.created)} pods were made after {world.num_faults} strikes: {name}")
        if "rendezvous" in name:
            self._check_earlier(item)
        elif world.now_s > self.excused_until_s and len(self._present()) >= self._most_pods():
            names = [other["metadata"]["name"] for other in self._present()]
            raise Violation(f"pod {name} is made beside {names}, at most {self._most_pods()} are wanted")

    def _check_earlier(self, item: JsonObject) -> None:
        """A new rendezvous begins with what the status knows of those before."""
        variables = {entry["name"]: entry.get("value", "") for entry in item["spec"]["containers"][0]["env"]}
        said = variables.get("UNBROKEN_EARLIER")
        earlier = decode(said, Earlier) if said else Earlier()
        stands_by = layout.STANDBY_ANNOTATION in item["metadata"]["annotations"]
        known, since_s = self._known_term
        if not stands_by and earlier.term < known and self.world.now_s > since_s + EXCUSED_S:
            raise Violation(f"a rendezvous is made with term {earlier.term}, the status knows {known}")

    def _on_change(self, collection: str, change: Change) -> None:
        self._check_writer(collection)
        if collection == PODS:
            self._check_change_of_pod(change)
        elif collection == JOBS:
            term = ((change.item.get("status") or {}).get("rendezvous") or {}).get("term") or 0
            if term > self._known_term[0]:
                self._known_term = (term, self.world.now_s)
        elif collection == NODES:
            self.excuse()
        elif collection == LEASES:
            holder = change.item["spec"].get("holderIdentity") or ""
            if holder != self.holder[0]:
                self.holder = (holder, self.world.now_s)

    def _check_writer(self, collection: str) -> None:
        """Only who holds the lease writes; what is on its way when it is lost arrives soon."""
        caller, (holder, since_s) = self.world.caller, self.holder
        if caller is None or collection == LEASES or caller.identity == holder or not holder:
            return
        if self.world.now_s > since_s + WRITES_LATE_S:
            raise Violation(f"{caller.identity} writes {collection}, {holder} leads since {since_s:.1f} s")

    def _check_change_of_pod(self, change: Change) -> None:
        world, item = self.world, change.item
        is_end = change.type == "DELETED" or bool(item["metadata"].get("deletionTimestamp"))
        if world.caller is not None:
            self._check_touch(change, is_end=is_end)
        if is_end:
            self._ending.add(item["metadata"]["uid"])
        self._note_blame(item, is_end=is_end)

    def _note_blame(self, item: JsonObject, *, is_end: bool) -> None:
        """Who is told to leave a node in trouble may be blamed, though its kubelet does not hear of it.

        Whether it was right to delete it is for `_check_deletion` to say.
        """
        is_led_away = bool((item["metadata"].get("annotations") or {}).get(layout.LEAVING_ANNOTATION))
        if (is_end or is_led_away) and self._is_in_trouble(item["spec"].get("nodeName") or ""):
            self.world.guilty_pods.add(item["metadata"]["uid"])

    def _is_in_trouble(self, node: str) -> bool:
        self._note_nodes()
        return self.world.now_s <= self.unready_at.get(node, -1e9) + EXCUSED_S

    def _check_touch(self, change: Change, *, is_end: bool) -> None:
        """The operator touches pods of its job alone."""
        world, item = self.world, change.item
        assert world.caller is not None
        owners = item["metadata"].get("ownerReferences") or []
        owner = (
            owners[0]["uid"] if owners else (item["metadata"].get("annotations") or {}).get(layout.JOB_UID_ANNOTATION)
        )
        name = item["metadata"]["name"]
        if owner != world.job_uid:
            raise Violation(f"{world.caller.identity} has touched pod {name} of {owner}: {change.type}")
        if is_end:
            self._check_deletion(item)

    def _check_deletion(self, item: JsonObject) -> None:
        """No pod is deleted that trains where nothing is wrong."""
        world, uid = self.world, item["metadata"]["uid"]
        pod = world.pods.get(uid)
        if uid in self._ending or pod is None or not _trains(pod):
            return
        since_s = self.training_since.get(uid)
        if since_s is None or world.now_s - since_s < TRAINED_S or world.final_phase is not None:
            return
        self._note_nodes()
        is_node_well = world.now_s > self.unready_at.get(item["spec"].get("nodeName") or "", -1e9) + EXCUSED_S
        # A node that only the API server does not reach may train on: its agent's connection is the better witness.
        if self._is_sure() or is_node_well:
            name = item["metadata"]["name"]
            raise Violation(f"pod {name} is deleted, and has trained for {world.now_s - since_s:.0f} s")

    def _is_sure(self) -> bool:
        """Whether a rendezvous has been there to be asked for long enough that its agents have come back to it."""
        return self.world.now_s > max(self.unsure_at_s, self.world.rendezvous.began_at_s) + TRAINED_S

    def _can_be_asked(self, rendezvous: RendezvousProcess | None) -> bool:
        """Whether anybody knows where the rendezvous is: its kubelet may not have said so yet."""
        if rendezvous is None or rendezvous.is_isolated:
            return False
        item = self.world.api.objects[PODS].get(rendezvous.name)
        return item is not None and bool(item["status"].get("podIP"))

    def _check_ordinals(self) -> None:
        """An ordinal in use is reserved in the status: else its number could be used again when all else is forgotten.

        A write that was given up for lost may still take effect, and take a later one back, until the next one.
        """
        reserved = self.world.job_status().get("nextPodOrdinal") or 0
        used = [name for name in self.created if "rendezvous" not in name and layout.pod_ordinal(name) >= reserved]
        if not used or not self._is_undisturbed():
            self._unreserved_since_s = None
            return
        if self._unreserved_since_s is None:
            self._unreserved_since_s = self.world.now_s
        if self.world.now_s - self._unreserved_since_s > UNRESERVED_S:
            raise Violation(f"the status reserves ordinals below {reserved}, and {used[0]} was made")

    # --------------------------------------------------------------------------------------------- every few seconds

    def _look(self) -> None:
        world = self.world
        world.after(LOOK_S, self._look, "")
        self._note_training()
        self._note_nodes()
        if world.network.is_down or not all(machine.is_heard for machine in world.machines.by_name.values()):
            self.away_at_s = world.now_s
        leader, rendezvous = world.operators.leader, world.rendezvous.leader
        if leader is None or leader.is_deaf or leader.loop.is_paused or not self._can_be_asked(rendezvous):
            self.unsure_at_s = world.now_s
        elif leader.is_cut_off or world.network.is_down:
            # Its view of pods is an old one until it lists them again; that of nodes may be new already.
            self.unsure_at_s = world.now_s + MAX_DELAY_S
        self._check_ordinals()
        self._check_claim()
        self._check_surplus()
        self._check_recovered()
        self._note_end()

    def _note_training(self) -> None:
        now_s = self.world.now_s
        pods = self.world.pods.items()
        training = {uid for uid, pod in pods if pod.is_alive and pod.is_welcome and not pod.is_leaving and _trains(pod)}
        self.training_since = {uid: self.training_since.get(uid, now_s) for uid in training}

    def _note_nodes(self) -> None:
        for machine in self.world.machines.by_name.values():
            if not self.world.machines.is_ready(machine) or self.world.machines.is_cordoned(machine):
                self.unready_at[machine.name] = self.world.now_s

    def _is_control_well(self) -> bool:
        world = self.world
        leader = world.operators.leader
        is_well = leader is not None and not (leader.is_cut_off or leader.is_deaf or leader.loop.is_paused)
        recent = leader is not None and leader.leads_since_s is not None and world.now_s - leader.leads_since_s > LOOK_S
        return is_well and recent and not world.network.is_down and world.now_s > world.network.slow_until_s

    def _is_undisturbed(self) -> bool:
        """Whether an operator leads, reaches all, and nothing that it asks for goes wrong."""
        network = self.world.network
        return self._is_control_well() and network.weather == 0.0 and not any(network.armed.values())

    def _check_claim(self) -> None:
        """The status says that the job runs only while a rank trains, but for a moment."""
        world = self.world
        says = world.job_status().get("state") == JobStateWord.RUNNING.value
        is_false = says and not self.training_since and self._is_undisturbed()
        is_false = is_false and world.final_phase is None and not self._is_ending()
        if not is_false:
            self._false_since_s = None
            return
        if self._false_since_s is None:
            self._false_since_s = world.now_s
        if world.now_s - self._false_since_s > FALSE_CLAIM_S + world.settings.timeouts.hard_s:
            raise Violation(f"the status says Running, no rank trains since {self._false_since_s:.0f} s")

    def _is_ending(self) -> bool:
        coordinator = self.world.coordinator
        return coordinator is not None and coordinator.phase is JobPhase.ENDING

    def _num_wanted(self) -> int:
        settings = self.world.settings
        return settings.replicas + settings.spares

    def _most_pods(self) -> int:
        """Return how many training pods may be there: one for each that is to leave its node is made ahead."""
        return self._num_wanted() + max(1, self.world.settings.spares)

    def _present(self) -> list[JsonObject]:
        """Return the training pods that exist, on nodes that are there."""
        world = self.world
        found = []
        for item in world.api.items(PODS):
            name = item["metadata"]["name"]
            if self.created.get(name) != item["metadata"]["uid"] or "rendezvous" in name:
                continue
            if item["metadata"].get("deletionTimestamp") or item["status"].get("phase") in ("Failed", "Succeeded"):
                continue
            machine = world.machines.by_name.get(item["spec"].get("nodeName") or "")
            if machine is None or world.machines.is_ready(machine):
                found.append(item)
        return found

    def _check_surplus(self) -> None:
        """No more pods exist than are wanted, and one more for each that leaves its node, but for a moment."""
        world = self.world
        most = self._most_pods()
        num = len(self._present())
        is_excused = not self._is_undisturbed() or world.now_s < self.quota_until_s or self._is_gathering()
        if num <= most or is_excused:
            self._surplus_since_s = None
            return
        if self._surplus_since_s is None:
            self._surplus_since_s = world.now_s
        if world.now_s - self._surplus_since_s > SURPLUS_S:
            raise Violation(f"{num} pods since {self._surplus_since_s:.0f} s, at most {most} are wanted")

    def _is_gathering(self) -> bool:
        """Whether a rendezvous of a job that has run does not know yet who has which rank: nobody can be spared."""
        coordinator = self.world.coordinator
        return coordinator is not None and coordinator._job.world.iteration < 0 and bool(self.world.entries)

    def _check_recovered(self) -> None:
        world = self.world
        if self.calm_since_s is None or world.final_phase is not None:
            return
        waited_s = world.now_s - self.calm_since_s
        if waited_s > RECOVERED_S + world.schedule.work_s:
            status = world.job_status()
            said = [item for item in status.get("conditions") or () if item["type"] in ("Running", "Failed")]
            raise Violation(f"not over {waited_s:.0f} s after the last strike: {status.get('state')} {said}")

    def _note_end(self) -> None:
        world = self.world
        state = world.job_status().get("state")
        if state in OVER_WORDS and world.ended_at_s is None and not any(pod.is_alive for pod in world.pods.values()):
            world.ended_at_s = world.now_s

    # ------------------------------------------------------------------------------------------------------- by and by

    def check_identity(self, pod: Pod) -> None:
        """No two processes bear one name at a time."""
        for other in self.world.pods.values():
            if other.name == pod.name and other.is_alive:
                raise Violation(f"{pod.name} runs twice: {other.uid} and {pod.uid}")

    def excuse(self) -> None:
        """Allow more pods than are wanted for a while: something that nobody can know of has happened."""
        self.excused_until_s = max(self.excused_until_s, self.world.now_s + EXCUSED_S)

    def check_lead(self, process: RendezvousProcess) -> None:
        """No rendezvous is told to lead while another one leads that its kubelet could have ended."""
        other = self.world.rendezvous.leader
        if other is None or other is process or other.is_isolated:
            return
        machines = self.world.machines.by_name.values()
        is_heard = any(machine.is_heard and other.uid in machine.containers for machine in machines)
        if is_heard and self.world.now_s > self.away_at_s + EXCUSED_S:
            raise Violation(f"{process.name} is told to lead, and {other.name} still does")

    def check_observation(self, observation: Observation) -> None:
        """What is said to have ended has ended."""
        self.last_observation = observation
        for uid, pod in self.world.pods.items():
            if not pod.is_alive:
                continue
            seen = observation.pods.get(uid)
            is_named = seen is not None and seen.gone is Cause.NODE_LOST and self._is_in_trouble(seen.node)
            if is_named and not self._is_sure():
                self.world.guilty_pods.add(uid)  # The first report of a new rendezvous knows few agents.
            if seen is not None and seen.is_ended:
                raise Violation(f"{pod.name} is said to have ended, and runs")
            if seen is None and observation.is_accounted:
                raise Violation(f"all pods that are not there are said to have ended, and {pod.name} runs")

    def check_end(self) -> None:
        """The job came to an end, as its ranks did, and the status says so."""
        world = self.world
        self._check_left()
        status = world.job_status()
        state = status.get("state")
        if world.ended_at_s is None:
            raise Violation(f"not over after {world.now_s:.0f} s: {state} {status.get('conditions')}")
        final = world.final_status
        if final is None:
            raise Violation(f"the status says {state}, and no coordinator has said how the job ended")
        if world.lost_in_ending:
            return  # A rendezvous that begins when pods have ended already cannot know how.
        if state != ("Complete" if final.phase is JobPhase.COMPLETE else "Failed"):
            raise Violation(f"the status says {state}, the last rendezvous {final.phase}: {final.message}")
        self._check_outcome(final.reason, final.message)

    def _check_outcome(self, reason: Reason, message: str) -> None:
        final = self.world.final_phase
        allowed = {Reason.FAILED_AFTER_TRAINING}
        # What a user calls a hopeless script: the same worker is killed before it was ready, or after no step.
        killed = sum(self.world.strikes[name] for name in FAULTS_OF_WORKERS)
        allowed |= {Reason.FAILED_BEFORE_READY} if killed >= 2 else set()
        allowed |= {Reason.NO_PROGRESS} if killed >= 5 else set()
        if final is JobPhase.FAILED and reason not in allowed:
            raise Violation(f"failed without need: {reason} {message}")

    def _check_left(self) -> None:
        """Strangers are as they were; what runs no more holds nothing."""
        world = self.world
        for pod in world.plan_of_faults.strangers:
            if pod["metadata"]["name"] not in world.api.objects[PODS]:
                raise Violation(f"pod {pod['metadata']['name']} of somebody else is gone")

    def names(self) -> dict[str, Any]:
        """Return what exists, for a story."""
        return {item["metadata"]["name"]: item["status"].get("phase") for item in self.world.api.items(PODS)}


def _trains(pod: Pod) -> bool:
    return any(
        worker.phase is WorkerPhase.RUNNING and worker.rank is not None and not worker.is_hung for worker in pod.workers
    ) and any(pod.world.trains(worker.iteration) for worker in pod.workers)
