"""A spare's rehearsal: the first process group of a process, made while nobody waits for it."""

import logging
import sys
from typing import Any

from unbroken.inprocess.groups import take_groups

logger = logging.getLogger(__name__)


def rehearse() -> list[Any]:
    """Make a gloo group of this worker alone and do a collective in it; return the group, to be destroyed.

    The first group costs a process several milliseconds more than each later one: all that it touches is touched for
    the first time, and copied, where the process was forked. A spare has that behind it when it takes over. Does
    nothing where torch.distributed is not loaded, or in use; what fails here will say so when it is needed.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_gloo_available() or dist.is_initialized():
        return []
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        # Of the CPU, whatever the script has made the default.
        dist.all_reduce(sys.modules["torch"].ones(1, device="cpu"))
    except Exception as error:
        logger.debug("no rehearsal: error=%s", error)
    return take_groups()
