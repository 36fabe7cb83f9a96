"""A process group that the script made before the wrapped call: each iteration gets one of the same kind.

The group itself is of the ranks before the first plan, and its store is not that of an iteration. So it is taken out of
torch's registry, and made again for the ranks of each iteration, with the same backend and timeout.
"""

import datetime
import logging
import threading
from collections.abc import Callable
from typing import Any

from unbroken.inprocess.exception import RestartAbort
from unbroken.inprocess.torch_state.groups import take_groups

logger = logging.getLogger(__name__)

_TWICE = "default process group twice"


class EarlyGroup:
    """What is known of the group. Belongs to one call and its main thread."""

    def __init__(self, backend: str, timeout: datetime.timedelta | None, groups: list[Any]) -> None:
        """`groups` are kept until all ranks have called: one that is late may still use them."""
        self._backend = backend
        self._timeout = timeout
        self._groups = groups

    def call_with_group(self, function: Callable[[], Any]) -> Any:
        """Make the iteration's group, then call. Raises RestartAbort if the function makes one as well."""
        import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

        if self._groups:
            # There is a plan, so all ranks have called. Their end is slow, and nobody waits for it.
            threading.Thread(target=self._groups.clear, name="unbroken-early-groups", daemon=True).start()
        dist.init_process_group(self._backend, timeout=self._timeout)
        try:
            return function()
        except ValueError as error:
            if _TWICE not in str(error):
                raise
            raise RestartAbort(
                "process group: made before the wrapped call and in the wrapped function as well; make it in one "
                "place, best in the function: a group that is made before the call is made again in each iteration"
            ) from error


def take_early_group() -> EarlyGroup | None:
    """Take the group that exists, and all groups beside it, out of torch's registry; None without one.

    Raises ValueError if the script made more than the default group: nobody could make the others again.
    """
    import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

    if not dist.is_available() or not dist.is_initialized():
        return None
    c10d = dist.distributed_c10d
    if len(c10d._world.pg_names) > 1:
        names = sorted(c10d._world.pg_names.values())
        raise ValueError(
            f"process groups made before the wrapped call: want the default group at most, got {len(names)} "
            f"({', '.join(names)[:200]}); make the others in the wrapped function"
        )
    group = c10d._get_default_group()
    backend = str(c10d._world.pg_backend_config[group])
    timeout = _timeout_of(group)
    logger.warning(
        "a process group was made before the wrapped call: each iteration gets a new one, backend=%s timeout=%s; what "
        "was built on the old one, such as a DistributedDataParallel, must be built in the function",
        backend,
        timeout,
    )
    return EarlyGroup(backend, timeout, take_groups())


def _timeout_of(group: Any) -> datetime.timedelta | None:
    """Return the timeout of a group; None, torch's default, where its backend does not tell."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None
