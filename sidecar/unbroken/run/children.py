"""Processes of a run: they and all their descendants end with it."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from unbroken.launch.process_tree import adopt_orphans, die_with_parent

_LEFTOVERS_S = 5.0
"""How long a killed process may take to end: the next run may need what it holds, such as a GPU's memory."""
_PAUSE_S = 0.01


class Child:
    """One process that this run started."""

    def __init__(self, name: str, pid: int, ended: "asyncio.Future[int]") -> None:
        self.name = name
        self.pid = pid
        self.ended = ended
        """Exit code once it has ended; -N for signal N."""

    @property
    def is_alive(self) -> bool:
        """Whether it is not reaped yet."""
        return not self.ended.done()

    def signal(self, number: int) -> None:
        """Send a signal; harmless once it has ended."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Children:
    """All processes of a run. Lives in one event loop, in the main thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._by_pid: dict[int, Child] = {}
        self._tie = die_with_parent()
        adopt_orphans()
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path | None) -> Child:
        """Start a process in a session of its own, so that Ctrl-C reaches this run only. Raises OSError."""
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # This process has only one thread, so nothing can be locked in the child.
            preexec_fn=self._tie,  # noqa: PLW1509 - see above
        )
        # Reaped here, not by Popen.
        process.returncode = 0
        child = Child(name, process.pid, self._loop.create_future())
        self._by_pid[process.pid] = child
        return child

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._by_pid.pop(pid, None)
            if child is not None and not child.ended.done():
                child.ended.set_result(os.waitstatus_to_exitcode(status))

    async def stop(self, children: Sequence[Child], grace_s: float) -> None:
        """End processes: SIGTERM, and SIGKILL after the grace."""
        alive = [child for child in children if child.is_alive]
        for child in alive:
            child.signal(signal.SIGTERM)
        if alive:
            await asyncio.wait([child.ended for child in alive], timeout=grace_s)
        for child in alive:
            child.signal(signal.SIGKILL)
        if alive:
            await asyncio.wait([child.ended for child in alive], timeout=5.0)

    async def kill_leftovers(self) -> None:
        """Kill all descendants and wait for their ends; orphans were adopted by this process. The last call."""
        until_s = self._loop.time() + _LEFTOVERS_S
        while (found := _descendants(os.getpid())) and self._loop.time() < until_s:
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_PAUSE_S)
            self._reap()
        # The loop closes what signals are written to before it gives them up: one in between would be complained of.
        self._loop.remove_signal_handler(signal.SIGCHLD)


def _descendants(root: int) -> list[int]:
    """Return the living processes below `root`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    layer = {root}
    while layer:
        layer = {pid for pid, parent in parents.items() if parent in layer}
        found += layer
    return found
