"""When the operator writes tokens of pods: before the pods that mount them, and ahead of those that will."""

import dataclasses

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_job, running_world

from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import CreatePod, CreateSecret, CreateTokens, RepairTokens
from unbroken_operator.decisions.snapshot import PlanMemory, SecretView


def test_tokens_are_there_before_the_pods_that_mount_them() -> None:
    world = World(a_job(replicas=130, spares={"count": 0}))
    actions = [action for action in world.actions() if isinstance(action, CreateSecret | CreateTokens | CreatePod)]
    kinds = [type(action) for action in actions if not _is_rendezvous(action)]
    assert kinds == [CreateSecret, *[CreateTokens] * 3, *[CreatePod] * 130]
    assert [action.block for action in actions if isinstance(action, CreateTokens)] == [0, 1, 2]
    world.settle()
    mounted = {_tokens_of(world, name) for name in world.names()}
    assert mounted == {f"digits.agents-{block}-rendezvous" for block in range(3)}
    assert world.actions() == ()


def _is_rendezvous(action: CreateSecret | CreateTokens | CreatePod) -> bool:
    name = action.manifest["metadata"]["name"]
    return isinstance(action, CreatePod) and layout.RENDEZVOUS in name


def _tokens_of(world: World, pod: str) -> str:
    (volume,) = (volume for volume in world.pods[pod]["spec"]["volumes"] if "projected" in volume)
    return str(volume["projected"]["sources"][0]["secret"]["name"])


def test_replacing_a_pod_never_waits_for_tokens_and_writes_them_once_in_a_block() -> None:
    world = running_world()
    created: dict[int, int] = {}
    for _ in range(150):
        victim = next(name for name in world.names() if world.pods[name]["status"]["phase"] == "Running")
        world.end_pod(victim, "Failed")
        world.memory = PlanMemory()
        actions = world.actions()
        blocks = [index for index, action in enumerate(actions) if isinstance(action, CreateTokens)]
        pods = [index for index, action in enumerate(actions) if isinstance(action, CreatePod)]
        # They come after the pod, for later ones.
        assert all(index > max(pods) for index in blocks)
        for index in blocks:
            action = actions[index]
            assert isinstance(action, CreateTokens)
            created[action.block] = created.get(action.block, 0) + 1
        world.settle()
        world.run_pods()
    assert created == {1: 1, 2: 1}


def test_a_job_that_an_earlier_release_began_gets_no_tokens_and_its_new_pods_share_the_old_one() -> None:
    world = World()
    world.has_job_key = False
    world.settle()
    assert world.tokens == {}
    volumes = [volume for name in world.names() for volume in world.pods[name]["spec"]["volumes"]]
    assert not any("projected" in volume for volume in volumes)


def test_deleted_tokens_come_back_and_those_of_an_earlier_key_are_written_again() -> None:
    world = running_world()
    world.settle()
    uid = world.tokens[0].uid
    world.tokens = {}
    assert [type(action) for action in world.actions()] == [CreateTokens]
    world.settle()
    assert world.secret is not None
    world.tokens = {0: dataclasses.replace(world.tokens[0], is_stale=True)}
    world.secret = dataclasses.replace(world.secret, is_stale=True)
    repairs = [action for action in world.actions() if isinstance(action, RepairTokens)]
    assert repairs == [
        RepairTokens(None, "digits-rendezvous", world.secret.uid),
        RepairTokens(0, "digits.agents-0-rendezvous", uid),
    ]
    world.settle()
    assert not world.tokens[0].is_stale


def test_tokens_that_cannot_be_written_are_told_and_tried_again_later() -> None:
    world = running_world()
    world.settle()
    world.tokens = {0: dataclasses.replace(world.tokens[0], is_stale=True)}
    repair = RepairTokens(0, world.tokens[0].name, world.tokens[0].uid)
    world.memory = dataclasses.replace(world.memory, reverts={repair.key: (5, 0.0)})
    world.end_pod("digits-0", "Failed")
    assert repair not in world.actions()
    world.settle()
    assert world.condition("PodsReady") == ("False", "SecretDamaged")


@pytest.mark.parametrize("block", [0, 1])
def test_tokens_of_someone_else_are_shown_and_waited_for(block: int) -> None:
    """Another job's pods may have made it a second ago, or a tenant who wants pods to mount what is in it."""
    world = World()
    world.tokens = {block: SecretView(f"digits.agents-{block}-rendezvous", "other", "another-owner")}
    world.settle()
    assert world.condition("Admitted") == ("False", "NameTaken")
    assert world.created == []
