"""The environment that torchrun gives its workers, for jobs whose processes are restarted. Pure."""

from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Plan, RankPlan
from unbroken_core.protocol.settings import JobSettings

_NO_LIMIT = 2**31 - 1


def environment(settings: JobSettings, plan: Plan, part: RankPlan) -> dict[str, str]:
    """Return the variables for one active worker of a plan; `part.rank` is not None."""
    local = [ranked for ranked in plan.ranks if ranked.rank is not None]
    group_rank = min(ranked.rank or 0 for ranked in local) // settings.ranks_per_pod
    local_rank = sorted(ranked.local_rank for ranked in local).index(part.local_rank)
    return {
        "RANK": str(part.rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": str(local_rank if len(local) < len(plan.ranks) else part.local_rank),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "GROUP_RANK": str(group_rank),
        "GROUP_WORLD_SIZE": str(-(-plan.world_size // settings.ranks_per_pod)),
        "ROLE_RANK": str(part.rank),
        "ROLE_WORLD_SIZE": str(plan.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": plan.master_host,
        "MASTER_PORT": str(plan.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(plan.iteration),
        "TORCHELASTIC_MAX_RESTARTS": str(_max_restarts(settings)),
        "TORCHELASTIC_RUN_ID": settings.uid or settings.job,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "UNBROKEN_TERM": str(plan.term),
        # A wrapper in the script must not restart in its process: this job does not.
        "UNBROKEN_IN_PROCESS": "0",
        **({} if plan.restore is None else {"UNBROKEN_RESTORE": wire.encode(plan.restore)}),
    }


def _max_restarts(settings: JobSettings) -> int:
    limits = [budget.limit for budget in settings.rungs]
    return sum(limit for limit in limits if limit is not None) if None not in limits else _NO_LIMIT
