"""Pods that somebody else made in the job's namespace, with its labels and with the job as their controller."""

import copy

import pytest

from unbroken_operator.adapters.stores import NodeStore, PodStore
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import CreatePod, CreateTokens
from unbroken_operator.worker import _look, _token_blocks

from .operator_world import World, running_world

TOO_LARGE = f"digits-{'9' * 60}"


def forge(world: World, name: str, like: str = "digits-0") -> None:
    """Add a pod of this name that is in all else like one of the job's, and starts on its node."""
    pod = copy.deepcopy(world.pods[like])
    pod["metadata"] |= {"name": name, "uid": f"uid-of-{name}"}
    pod["status"] = {"phase": "Pending"}
    world.pods[name] = pod


@pytest.mark.parametrize("name", [TOO_LARGE, "other-7", "digits-007", f"digits-{10**9}", "digits-x"])
def test_a_pod_of_a_name_that_the_job_gives_to_none_is_none_of_its_pods(name: str) -> None:
    """Before, the Secret for a name of 60 digits was refused, and a job whose pods are refused makes no others."""
    world = running_world()
    forge(world, name)
    assert [pod.name for pod in world.snapshot().trainers()] == ["digits-0", "digits-1", "digits-2"]
    world.end_pod("digits-1", "Failed")
    actions = world.actions()
    assert [action.manifest["metadata"]["name"] for action in actions if isinstance(action, CreatePod)] == ["digits-3"]
    assert [action for action in actions if isinstance(action, CreateTokens)] == []


def test_hundreds_of_forged_pods_make_no_secrets_and_cost_few_requests() -> None:
    """Before, each of them was worth a Secret of the job, and the read of one every ten seconds."""
    world = running_world()
    for number in range(1, 300):
        forge(world, f"digits-{number * layout.TOKENS_PER_SECRET}")
    made = [action.block for action in world.actions() if isinstance(action, CreateTokens)]
    assert len(made) <= 1, "at most the one that the next pod would need"
    store = PodStore(lambda _: None)
    for pod in world.pods.values():
        store.upsert({**pod, "metadata": {**pod["metadata"], "resourceVersion": "5"}})
    namespace, uid = world.job["metadata"]["namespace"], world.job["metadata"]["uid"]
    blocks, starting = _token_blocks(store.held((namespace, "digits"), uid), "digits", num_most=10)
    assert blocks == set(range(8))
    assert starting <= blocks


@pytest.mark.parametrize("name", ["x-9", f"x-{'9' * 240}", f"digits-rendezvous-{2**62}", f"digits-{'9' * 60}"])
def test_a_forged_rendezvous_burns_no_ordinals_and_is_not_asked(name: str) -> None:
    """Before, the name of the next one was longer than a name may be: the job would never have had one again."""
    world = running_world()
    (own,) = world.names(layout.RENDEZVOUS)
    before = world.snapshot().next_rendezvous_ordinal
    forge(world, name, like=own)
    world.pods[name]["status"] = {"phase": "Running", "podIP": "10.0.0.66"}
    assert world.snapshot().next_rendezvous_ordinal == before
    assert [pod.name for pod in world.snapshot().rendezvous_pods()] == [own]
    store = PodStore(lambda _: None)
    for pod in world.pods.values():
        store.upsert({**pod, "metadata": {**pod["metadata"], "resourceVersion": "5"}})
    namespace, uid = world.job["metadata"]["namespace"], world.job["metadata"]["uid"]
    held, nodes = store.held((namespace, "digits"), uid), NodeStore(lambda _: None)
    assert name not in [pod.name for pod in _look(held, "digits", nodes).rendezvous]
