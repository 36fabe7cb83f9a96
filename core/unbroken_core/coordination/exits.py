"""Exit codes with which a script says that no restart would help: the job ends with the first of them."""

from unbroken_core.coordination.members import Member
from unbroken_core.coordination.planning import finish
from unbroken_core.coordination.state import Job
from unbroken_core.reasons import JobPhase, Reason, WorkerPhase

_OVER = (JobPhase.COMPLETE, JobPhase.FAILED)


def hear_exits(job: Job, member: Member) -> None:
    """Fail the job when a process of this pod has ended with such a code by itself."""
    codes = job.settings.fatal_exit_codes
    if not codes or job.phase in _OVER:
        return
    for local_rank, place in member.places.items():
        fault = place.state.fault
        if fault is None or place.state.phase is not WorkerPhase.GONE or place.replacing is not None:
            continue  # What was told to end may end as it likes.
        if fault.exit_code in codes:
            rank = member.ranks.get(local_rank)
            who = f"{member.pod} worker {local_rank}" if rank is None else f"rank {rank} ({member.pod})"
            message = f"{who} exited with code {fault.exit_code}, after which restart.fatalExitCodes wants no restart"
            finish(job, JobPhase.FAILED, Reason.FATAL_EXIT, message)
            return
