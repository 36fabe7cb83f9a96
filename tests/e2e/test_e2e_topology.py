"""Labels, spares and racks, with a real operator, scheduler and rendezvous on each kind of API server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from unbroken_core.vocabulary.reasons import Role
from unbroken_local.demo.snapshot import RACK_LABEL, PodView, Snapshot

from .e2e_bench import ON_ONE_REAL_SERVER, Bench, Json, condition, job

LIMIT_S = 90.0


def racked_job() -> Json:
    """Return a job of six active pods and two spares, one GPU node each: eight nodes in two racks of four."""
    container: Json = {
        "name": "trainer",
        "image": "unbroken/trainer-example:0.1.0",
        "command": ["sleep", "600"],
        "resources": {"limits": {"nvidia.com/gpu": 2}},
    }
    return job(
        "racked",
        [],
        replicas=6,
        spares={"count": 2},
        restart={"rungs": [{"name": "process"}, {"name": "pod"}]},
        topology={"layers": [{"name": "rack", "label": RACK_LABEL}]},
        template={"spec": {"containers": [container], "terminationGracePeriodSeconds": 1}},
    )


@asynccontextmanager
async def labelled_and_cordoned(bench: Bench) -> AsyncIterator[None]:
    """Put right afterwards what the test does to nodes."""
    try:
        yield
    finally:
        await bench.cluster.kubectl("uncordon", "node-a4", "node-b4")
        for name in ("node-a1", "node-a4", "node-b4"):
            await relabel(bench, name, f"rack-{name[5]}")


async def relabel(bench: Bench, node: str, rack: str) -> None:
    await bench.cluster.kubectl("label", "node", node, f"{RACK_LABEL}={rack}", "--overwrite")


def pod_on(snapshot: Snapshot, node: str) -> PodView:
    """Return the training pod on a node, one that ends aside."""
    pods = [pod for seen in snapshot.nodes if seen.name == node for pod in seen.pods]
    (found,) = [pod for pod in pods if pod.is_trainer and not pod.is_ending]
    return found


def rack_of(snapshot: Snapshot, pod: PodView) -> str:
    """Return the rack of a pod as the rendezvous knows it; "" when it does not know the pod."""
    assert snapshot.status is not None
    return next((seen.domains[0] for seen in snapshot.status.pods if seen.uid == pod.uid), "")


@ON_ONE_REAL_SERVER
@pytest.mark.timeout(300)
def test_spares_stand_where_ranks_are_and_the_next_plan_knows_labels_that_changed(bench: Bench) -> None:
    """What the spares lack is said and taken back; a spare is near by the labels of now, not of the start."""

    async def scenario() -> None:
        async with (
            labelled_and_cordoned(bench),
            bench.namespace("racked") as namespace,
            bench.observe(namespace, "racked") as observer,
        ):
            # The active pods get the other nodes, whatever the scheduler likes best.
            await bench.cluster.kubectl("cordon", "node-a4", "node-b4")
            await bench.apply(namespace, racked_job())
            await observer.wait(
                "spares without room", lambda now: condition(now, "SparesSpread").get("status") == "False", LIMIT_S
            )
            await bench.cluster.kubectl("uncordon", "node-b4")
            want = (
                "rack: no spare pod in rack-a. Free or add a node there, then delete a spare pod elsewhere: the next "
                "one is made there"
            )
            await observer.wait(
                "one spare without room", lambda now: condition(now, "SparesSpread")["message"] == want, LIMIT_S
            )
            await bench.wait_event(namespace, "racked", "SparesNotSpread")

            await bench.cluster.kubectl("uncordon", "node-a4")
            seen = await observer.wait(
                "a spare in each rack",
                lambda now: condition(now, "SparesSpread").get("status") == "True" and now.num_ready_spares == 2,
                LIMIT_S,
            )
            in_a, in_b = pod_on(seen, "node-a4"), pod_on(seen, "node-b4")
            assert (in_a.role, in_b.role) == (Role.SPARE, Role.SPARE)

            # The two spares change racks, and a pod of rack-a is lost: the one that is in rack-a now takes over.
            await relabel(bench, "node-a4", "rack-b")
            await relabel(bench, "node-b4", "rack-a")
            seen = await observer.wait(
                "the new labels in the rendezvous",
                lambda now: (rack_of(now, in_a), rack_of(now, in_b)) == ("rack-b", "rack-a"),
                LIMIT_S,
            )
            lost = pod_on(seen, "node-a1")
            await bench.cluster.kubectl("delete", "pod", lost.name, "-n", namespace, "--wait=false")
            seen = await observer.wait(
                "the takeover", lambda now: now.is_training and bool(now.finished_recoveries), LIMIT_S
            )
            assert seen.finished_recoveries[-1].replaced_by == (in_b.name,)
            assert pod_on(seen, "node-b4").ranks == lost.ranks

            # The spare that follows stands where one is missed: on the freed node of rack-a.
            seen = await observer.wait(
                "a spare in each rack again",
                lambda now: now.num_ready_spares == 2 and condition(now, "SparesSpread").get("status") == "True",
                LIMIT_S,
            )
            assert pod_on(seen, "node-a1").role is Role.SPARE

            await relabel(bench, "node-a1", "rack-b")
            await observer.wait(
                "no spare in rack-a any more",
                lambda now: "rack-a" in condition(now, "SparesSpread")["message"],
                LIMIT_S,
            )

    asyncio.run(scenario())


@ON_ONE_REAL_SERVER
@pytest.mark.timeout(300)
def test_pods_of_one_host_are_neighbours_and_replace_each_other(bench: Bench) -> None:
    """Two active pods and a spare on one node, with the host as the innermost layer."""

    async def scenario() -> None:
        container: Json = {
            "name": "trainer",
            "image": "unbroken/trainer-example:0.1.0",
            "command": ["sleep", "600"],
            "resources": {"requests": {"cpu": 1}},
        }
        document = job(
            "crowded",
            [],
            replicas=2,
            ranksPerPod=2,
            spares={"count": 1},
            restart={"rungs": [{"name": "process"}, {"name": "pod"}]},
            topology={
                "layers": [{"name": "rack", "label": RACK_LABEL}, {"name": "host", "label": "kubernetes.io/hostname"}]
            },
            template={
                "spec": {
                    "containers": [container],
                    "nodeSelector": {"kubernetes.io/hostname": "node-b3"},
                    "terminationGracePeriodSeconds": 1,
                }
            },
        )
        async with bench.namespace("crowded") as namespace, bench.observe(namespace, "crowded") as observer:
            await bench.apply(namespace, document)
            seen = await observer.wait(
                "three pods on one host",
                lambda now: (
                    now.is_training
                    and now.num_ready_spares == 1
                    and bool(condition(now, "SparesSpread"))
                    # A label may reach the rendezvous after the pod has.
                    and now.status is not None
                    and {pod.domains for pod in now.status.pods} == {("rack-b", "node-b3")}
                ),
                LIMIT_S,
            )
            assert [pod.ranks for pod in seen.active_pods] == [(0, 1), (2, 3)]
            assert condition(seen, "TopologyKnown")["status"] == condition(seen, "SparesSpread")["status"] == "True"
            (spare,) = [pod for pod in seen.pods if pod.role is Role.SPARE]
            lost = seen.active_pods[1]
            await bench.cluster.kubectl("delete", "pod", lost.name, "-n", namespace, "--wait=false")
            seen = await observer.wait(
                "the takeover", lambda now: now.is_training and bool(now.finished_recoveries), LIMIT_S
            )
            assert seen.finished_recoveries[-1].replaced_by == (spare.name,)
            held = {pod.name: pod.ranks for pod in seen.active_pods}
            assert held[spare.name] == lost.ranks

    asyncio.run(scenario())
