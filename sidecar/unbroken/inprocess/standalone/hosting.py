"""Where a wrapped call runs: in a pod, or in standalone mode."""

import logging
from collections.abc import Mapping
from dataclasses import replace

from unbroken.inprocess.exception import NoAgentError
from unbroken.inprocess.loop import entry
from unbroken.inprocess.options import WrapperOptions
from unbroken.inprocess.pod.environment import PodContext, read_pod_context
from unbroken.inprocess.standalone.joining import JoinRequest, Registration, join, next_request
from unbroken.inprocess.standalone.launched import is_open_to_strangers, read_launched
from unbroken_core.conventions.tokens import read_shared_secret
from unbroken_core.protocol.settings import Timeouts

logger = logging.getLogger(__name__)

_next: list[JoinRequest] = []
"""Request of the next call, once there was a call: the environment does not describe it any more."""


class Hosting:
    """The pod of one call, or its standalone job, until `close`."""

    def __init__(self, options: WrapperOptions, environment: Mapping[str, str]) -> None:
        """Find the pod, or form a job and wait until it has formed.

        Raises NoAgentError when there is neither pod nor launcher, InputError about UNBROKEN_SECRET, TimeoutError that
        names the missing workers, and RestartError.
        """
        self._registration: Registration | None = None
        self._request: JoinRequest | None = None
        if environment.get("UNBROKEN_DIR"):
            if names := options.names_set_by_the_job():
                logger.warning("timeouts are set by the job, without effect here: options=%s", ",".join(names))
            self.place: PodContext = read_pod_context(environment)
            return
        request = _request(options, environment)
        self._registration = join(request)
        self._request = request
        self.place = self._registration.place
        # The job that has ended was another one.
        entry.forget_end()

    def close(self, num_workers: int | None) -> None:
        """Leave a standalone job. `num_workers` is the number of workers in the last plan, None when there was none."""
        if self._registration is None or self._request is None:
            return
        self._registration.close()
        if num_workers is not None:
            _next[:] = [next_request(self._request, num_workers, self._registration.is_first)]


def timeouts_of(options: WrapperOptions) -> Timeouts:
    """Return the timeouts of a job without a spec."""
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


def _request(options: WrapperOptions, environment: Mapping[str, str]) -> JoinRequest:
    limit_s = options.barrier_timeout.total_seconds()
    if _next:
        return replace(
            _next[0], timeouts=timeouts_of(options), limit_s=limit_s, no_progress_limit=options.no_progress_limit
        )
    port, host = _store_address(options)
    launched = read_launched(environment, port, host)
    if launched is None:
        raise NoAgentError(
            "no launcher found: neither torchrun's RANK, WORLD_SIZE and MASTER_ADDR, nor variables of mpirun or srun, "
            "nor a pod's UNBROKEN_DIR are set. Start the script with `torchrun --nproc-per-node N script.py` or "
            "`unbroken run --pods N --ranks-per-pod M script.py`, or as a ResilientTrainingJob"
        )
    secret = read_shared_secret(environment)
    if launched.rank == 0 and is_open_to_strangers(launched, secret):
        logger.warning(
            "anyone who reaches port %d of %s and knows the numbers of this job can join it: set UNBROKEN_SECRET to "
            "the same random text on all hosts, such as that of `openssl rand -hex 32`",
            launched.ports[0],
            launched.master_host,
        )
    return JoinRequest(
        launched=launched,
        call=0,
        world_size=launched.world_size,
        timeouts=timeouts_of(options),
        limit_s=limit_s,
        secret=secret,
        address=environment.get("UNBROKEN_POD_IP", ""),
        log_folder=environment.get("UNBROKEN_LOG_DIR", ""),
        no_progress_limit=options.no_progress_limit,
    )


def _store_address(options: WrapperOptions) -> tuple[int | None, str]:
    """Return port and host that the script chose for the reference's store: free, and reachable between hosts."""
    given = options.store_kwargs or {}
    port, host = given.get("port"), given.get("host_name")
    if port is not None and (not isinstance(port, int) or isinstance(port, bool)):
        raise TypeError(f"store_kwargs['port']: want an integer, got {port!r}")
    if host is not None and not isinstance(host, str):
        raise TypeError(f"store_kwargs['host_name']: want text, got {host!r}")
    return port, host or ""
