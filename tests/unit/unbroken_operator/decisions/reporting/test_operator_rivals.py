"""Two operators with Leases of their own, and one job: one of them goes on."""

from dataclasses import replace

from tests.unit.unbroken_operator.operator_world import World, running_world

from unbroken_operator.decisions.actions import WriteStatus
from unbroken_operator.decisions.memory import STAND_BACK_S, JobMemory
from unbroken_operator.decisions.plan import plan

LEASES = ("ml/unbroken", "unbroken-system/unbroken")


class Operators:
    """Two operators that plan in turn for one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memories = {lease: JobMemory() for lease in LEASES}
        self.num_writes = dict.fromkeys(LEASES, 0)
        self.now_s = 1000.0

    def turn(self, lease: str) -> None:
        """Let one of them look and act, as its worker does."""
        self.now_s += 1.0
        world, memory = self.world, self.memories[lease]
        memory.note_lease(lease, str((world.job.get("status") or {}).get("lease") or ""), self.now_s)
        view = memory.view(self.now_s)
        snapshot = replace(
            world.snapshot(),
            options=replace(world.options, lease=lease),
            memory=replace(world.memory, rival=view.rival, rival_for_s=view.rival_for_s),
        )
        for action in plan(snapshot).actions:
            if isinstance(action, WriteStatus):
                self.num_writes[lease] += 1
                memory.has_led = memory.has_led or "lease" in action.patch
            world.apply(action)


def test_of_two_operators_one_goes_on_and_the_other_leaves_the_job_alone() -> None:
    operators = Operators(running_world())
    for _ in range(5):
        for lease in reversed(LEASES):
            operators.turn(lease)
    before = dict(operators.num_writes)
    assert operators.world.job["status"]["lease"] == LEASES[0]
    (message,) = operators.world.messages("LedByAnother")
    assert f"that of Lease {LEASES[0]} goes on, that of Lease {LEASES[1]} leaves it alone" in message
    operators.world.end_pod("digits-1", "Failed")
    for _ in range(3):
        operators.turn(LEASES[1])
    assert operators.world.names() == ["digits-0", "digits-1", "digits-2"]
    assert operators.num_writes[LEASES[1]] == before[LEASES[1]]
    operators.turn(LEASES[0])
    operators.turn(LEASES[0])
    assert "digits-3" in operators.world.names()


def test_the_other_one_leads_again_when_the_first_was_uninstalled() -> None:
    operators = Operators(running_world())
    for _ in range(5):
        for lease in reversed(LEASES):
            operators.turn(lease)
    operators.now_s += STAND_BACK_S
    operators.turn(LEASES[1])
    operators.turn(LEASES[1])
    assert operators.world.job["status"]["lease"] == LEASES[1]
    operators.world.end_pod("digits-1", "Failed")
    operators.turn(LEASES[1])
    operators.turn(LEASES[1])
    assert "digits-3" in operators.world.names()


def test_a_release_that_follows_another_one_is_no_rival() -> None:
    operators = Operators(running_world())
    operators.turn(LEASES[0])
    for _ in range(3):
        operators.turn(LEASES[1])
    assert operators.world.job["status"]["lease"] == LEASES[1]
    assert operators.world.messages("LedByAnother") == []
