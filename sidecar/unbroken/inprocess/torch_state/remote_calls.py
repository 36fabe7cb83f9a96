"""torch.distributed.rpc: what a script has ended begins again in the next iteration, else a new process has to come.

An agent that runs cannot be begun again, and to end it from outside may wait for its peers, for ever where they are
gone. C++ keeps the rank of the first one for as long as the process lives. What Python counts (`caches`) is counted
from zero in each iteration: a survivor and a new process would wait for each other under different names.
"""

import sys
from typing import Any


class RemoteCalls:
    """Of one call. Belongs to the thread that runs the function."""

    def __init__(self) -> None:
        self._is_scripts: bool | None = None
        """Whether an agent ran before the call: then it is the script's own affair. None: not looked yet."""
        self._has_rank = False
        """Whether one was begun in the call, with the rank of that time."""

    def look(self) -> None:
        """Note what there is before the first iteration."""
        if self._is_scripts is None:
            self._is_scripts = _runs()

    def note_begun(self) -> None:
        """Note whether one was begun in the iteration that was left; before its count is emptied."""
        self._has_rank = self._has_rank or bool(getattr(_rpc(), "_init_counter", 0))

    def obstacle(self, is_other_rank: bool) -> str:
        """Return why there can be no other in this process; "" if there can."""
        if self._is_scripts:
            return ""
        if _runs():
            return (
                "torch.distributed.rpc still runs, and cannot be begun again in this process: call "
                "rpc.shutdown(graceful=False) in a finally block"
            )
        if is_other_rank and self._has_rank:
            return "torch.distributed.rpc keeps the rank with which it was begun for as long as the process lives"
        return ""


def _rpc() -> Any:
    return sys.modules.get("torch.distributed.rpc")


def _runs() -> bool:
    is_set = getattr(getattr(_rpc(), "api", None), "_is_current_rpc_agent_set", None)
    return is_set is not None and bool(is_set())
