"""Which of the two homes a wrapped call lives in: a pod's, which is there, or one that the wrappers bring along."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from unbroken.inprocess.exception import NoAgentError
from unbroken.inprocess.loop import entry
from unbroken.inprocess.options import Options
from unbroken.inprocess.pod.environment import Place, read_place
from unbroken.inprocess.standalone.joining import Home, Invitation, expect, take_seat
from unbroken.inprocess.standalone.launched import read_launched
from unbroken_core.settings import Timeouts

logger = logging.getLogger(__name__)

_next: list[Invitation] = []
"""Invitation to the next call, once there was one: the environment says something else by then."""


class Residence:
    """Where one call lives, until `close`."""

    def __init__(self, options: Options, environment: Mapping[str, str]) -> None:
        """Move in; waits until the job has formed, where there is none yet.

        Raises NoAgentError when there is nothing to live in, TimeoutError that says who is missing, RestartError.
        """
        self._home: Home | None = None
        self._invitation: Invitation | None = None
        if environment.get("UNBROKEN_DIR"):
            if names := options.names_set_by_the_job():
                logger.warning("timeouts are set by the job, without effect here: options=%s", ",".join(names))
            self.place: Place = read_place(environment)
            return
        invitation = _invitation(options, environment)
        self._home = take_seat(invitation)
        self._invitation = invitation
        self.place = self._home.place
        # What was over is another job.
        entry.forget_end()

    def close(self, num_workers: int | None) -> None:
        """Move out. `num_workers` is how many lived in the last plan, None when there was none."""
        if self._home is None or self._invitation is None:
            return
        self._home.close()
        if num_workers is not None:
            _next[:] = [expect(self._invitation, num_workers, self._home.is_first)]


def timeouts_of(options: Options) -> Timeouts:
    """Return the timeouts of a job that has no spec to say them."""
    heartbeat_s = options.heartbeat_timeout.total_seconds()
    barrier_s = options.barrier_timeout.total_seconds()
    return Timeouts(
        soft_s=options.soft_timeout.total_seconds(),
        hard_s=options.hard_timeout.total_seconds(),
        heartbeat_s=heartbeat_s,
        barrier_s=barrier_s,
        completion_s=options.completion_timeout.total_seconds(),
        termination_grace_s=options.termination_grace_time.total_seconds(),
        startup_s=barrier_s,
        reconnect_s=min(Timeouts.reconnect_s, heartbeat_s),
        last_call_s=options.last_call_wait.total_seconds(),
    )


def _invitation(options: Options, environment: Mapping[str, str]) -> Invitation:
    limit_s = options.barrier_timeout.total_seconds()
    if _next:
        return replace(_next[0], timeouts=timeouts_of(options), limit_s=limit_s)
    port, host = _store_address(options)
    launched = read_launched(environment, port, host)
    if launched is None:
        raise NoAgentError(
            "environment: want RANK, WORLD_SIZE and MASTER_ADDR as torchrun sets them, the variables of mpirun or "
            "srun, or UNBROKEN_DIR of a pod; none of them is set. Start the script with `torchrun --nproc-per-node N "
            "script.py` or `unbroken run --pods N --ranks-per-pod M script.py`, or as a ResilientTrainingJob"
        )
    return Invitation(
        launched=launched,
        call=0,
        world_size=launched.world_size,
        timeouts=timeouts_of(options),
        limit_s=limit_s,
        secret=environment.get("UNBROKEN_SECRET", ""),
        address=environment.get("UNBROKEN_POD_IP", ""),
        log_folder=environment.get("UNBROKEN_LOG_DIR", ""),
    )


def _store_address(options: Options) -> tuple[int | None, str]:
    """Return port and host that the script chose for the reference's store: they are free, and open between hosts."""
    given = options.store_kwargs or {}
    port, host = given.get("port"), given.get("host_name")
    if port is not None and (not isinstance(port, int) or isinstance(port, bool)):
        raise TypeError(f"store_kwargs['port']: want an integer, got {port!r}")
    if host is not None and not isinstance(host, str):
        raise TypeError(f"store_kwargs['host_name']: want text, got {host!r}")
    return port, host or ""
