"""The state that a plan gives to a worker. Pure."""

from unbroken.inprocess.state import Mode, State
from unbroken_core.pod.pod_messages import Enter


def state_in(enter: Enter, before: State | None) -> State:
    """Return the state in a plan; `before` is the one in this process' previous plan, None in its first."""
    size = enter.world_size + enter.spare_ranks
    rank = enter.world_size if enter.rank is None else enter.rank
    return State(
        rank=rank,
        world_size=size,
        active_rank=enter.rank,
        active_world_size=enter.world_size,
        initial_rank=rank if before is None else before.initial_rank,
        initial_world_size=size if before is None else before.initial_world_size,
        iteration=enter.iteration,
        mode=Mode.INACTIVE if enter.rank is None else Mode.ACTIVE,
    )
