"""The worker's end of the process that writes for it."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from unbroken.memory.background.orders import WriteOrder, send


class WriterProcess:
    """The process that writes for this one, and outlives its iterations."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.started_s = time.monotonic()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "unbroken.memory.background", str(theirs.fileno())]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        # Until it says that it has started.
        self._is_busy = True
        self.has_started = False
        """Whether it has said so: it imports torch first, at the lowest priority."""
        self.is_told = False
        """Whether the log says that a step was not written since it had not started."""

    @property
    def is_alive(self) -> bool:
        """Whether it can be ordered anything."""
        return self.owner == os.getpid() and self._process.poll() is None

    def is_free(self) -> bool:
        """Whether it has taken what was ordered."""
        try:
            while self._is_busy and self._connection.recv(16, socket.MSG_DONTWAIT):
                self._is_busy, self.has_started = False, True
        except BlockingIOError:
            return False
        return True

    def has_taken(self) -> bool:
        """Whether it has taken what was ordered last; not when it has ended before."""
        with contextlib.suppress(OSError):
            self.is_free()
        return not self._is_busy

    def order(self, order: WriteOrder, descriptors: Sequence[int]) -> None:
        """Send an order. Raises OSError."""
        self._is_busy = True
        send(self._connection, order, descriptors)

    def give_up(self, order: WriteOrder) -> None:
        """Send an order that has nothing to write; its turn comes after what is being written. Raises OSError."""
        send(self._connection, order, ())

    def close(self) -> None:
        """Let it end once it is done."""
        self._connection.close()
