"""Rehearses a first recovery while no other rank waits for this worker.

The first time costs more. A group costs milliseconds more in a forked process, where each page that is touched is
copied. And a collective that ends with an error costs seconds on a slow disk: C++ unwinds with tables of torch's
libraries that nothing else reads, page by page, while all ranks wait.
"""

import datetime
import logging
import sys
import threading
from typing import Any

from unbroken.inprocess.connections import sockets
from unbroken.inprocess.torch_state.groups import take_groups

logger = logging.getLogger(__name__)

_TIMEOUT = datetime.timedelta(seconds=3)
_LOOPBACK = "127.0.0.1"


def rehearse() -> list[Any]:
    """Make private gloo groups, complete a collective in one and abort one in another; return what to destroy.

    Does nothing where torch.distributed is not loaded, or in use; what fails here will say so when it is needed.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_gloo_available() or dist.is_initialized():
        return []
    pair: dict[int, Any] = {}
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(_number())
        _end_a_collective(dist, pair)
    except Exception as error:
        logger.debug("no rehearsal: error=%s", error)
    return [*pair.values(), *take_groups()]


def _end_a_collective(dist: Any, pair: dict[int, Any]) -> None:
    """Wait in a group of two ranks for one that never comes, and be freed as by an abort."""
    store = dist.HashStore()
    other = threading.Thread(target=_come_too, args=(dist, store, pair), name="unbroken-rehearsal", daemon=True)
    others = sockets.gloo_connections()
    other.start()
    _join(dist, store, 0, pair)
    other.join(_TIMEOUT.total_seconds())
    work = pair[0].allreduce([_number()])
    sockets.shut_gloo_connections(but=others)
    try:
        work.wait(_TIMEOUT)
    except RuntimeError as error:
        logger.debug("rehearsed: error=%s", error)
    finally:
        sockets.release_connections()


def _come_too(dist: Any, store: Any, pair: dict[int, Any]) -> None:
    try:
        _join(dist, store, 1, pair)
    except Exception as error:
        # Otherwise the thread would print a traceback into the script's output.
        logger.debug("no rehearsal: error=%s", error)


def _join(dist: Any, store: Any, rank: int, pair: dict[int, Any]) -> None:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = _TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    pair[rank] = dist.ProcessGroupGloo(store, rank, 2, options)


def _number() -> Any:
    # On the CPU, whatever the script's default device is.
    return sys.modules["torch"].ones(1, device="cpu")
