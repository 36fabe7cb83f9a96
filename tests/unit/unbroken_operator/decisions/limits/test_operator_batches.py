"""One plan makes a bounded number of pods, however many are wanted and however large the template is."""

from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import CONTAINER, World, a_job

from unbroken_operator.decisions.actions import CreatePod
from unbroken_operator.decisions.limits.batches import MAX_NEW_CHARACTERS, MAX_NEW_PODS
from unbroken_operator.decisions.limits.budgets import MAX_POD_BURST, MAX_PODS_PER_S, Budget, allowances
from unbroken_operator.decisions.plan import plan

LONG = "x" * 200_000


def new_pods(world: World) -> list[dict[str, Any]]:
    """Return the training pods that the plan makes now."""
    made = [dict(action.manifest) for action in plan(world.snapshot()).actions if isinstance(action, CreatePod)]
    return [pod for pod in made if "rendezvous" not in pod["metadata"]["name"]]


def test_a_plan_for_65_536_pods_makes_a_batch_of_them() -> None:
    """Before, all were in memory at once: 1.26 GB within a minute."""
    pods = new_pods(World(a_job(replicas=65_536, ranksPerPod=1)))
    assert [pod["metadata"]["name"] for pod in pods] == [f"digits-{number}" for number in range(MAX_NEW_PODS - 1)]


def test_of_a_large_template_a_plan_makes_few_pods() -> None:
    template = {"spec": {"containers": [{**CONTAINER, "args": [LONG]}]}}
    pods = new_pods(World(a_job(replicas=MAX_NEW_PODS, template=template)))
    assert 1 <= len(pods) <= MAX_NEW_CHARACTERS // len(LONG)


def test_pods_of_one_plan_share_the_template() -> None:
    others = [{"name": f"other-{number}", "image": "i:1"} for number in range(3)]
    template = {"spec": {"containers": [dict(CONTAINER), *others], "volumes": [{"name": "v", "emptyDir": {}}]}}
    first, second = (pod["spec"] for pod in new_pods(World(a_job(template=template)))[:2])
    assert first["containers"][1]["name"] == "other-0"
    assert all(one is other for one, other in zip(first["containers"][1:4], second["containers"][1:4], strict=True))
    assert first["volumes"][0] is second["volumes"][0]
    assert first["volumes"][-1] != second["volumes"][-1], "each pod has a token of its own"


def test_a_large_job_grows_batch_after_batch_without_gaps() -> None:
    num = 2 * MAX_NEW_PODS + 10
    world = World(a_job(replicas=num, spares={"count": 3}))
    # Each batch is a plan, the spares come with the last active pods, and one more writes tokens for later ones.
    assert world.settle() <= 4
    names = [name for name in world.created if "rendezvous" not in name]
    assert names == [f"digits-{number}" for number in range(num + 3)]


@pytest.mark.parametrize("num_pods", [1, 4096, 65_536, 131_072])
def test_a_job_that_says_it_is_large_may_not_use_up_the_api_server(num_pods: int) -> None:
    found = allowances(num_pods)
    for budget in (Budget.POD_CREATIONS, Budget.POD_DELETIONS):
        assert found[budget].burst <= MAX_POD_BURST
        assert found[budget].per_s <= MAX_PODS_PER_S
    # All pods of 4,096 may still be made, and made anew, in one go; each batch writes the status once.
    assert found[Budget.POD_CREATIONS].burst >= min(3 * num_pods, 12_288)
    assert found[Budget.STATUS_WRITES].burst >= 50 + num_pods // MAX_NEW_PODS
