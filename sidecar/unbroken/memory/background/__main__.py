"""`python -m unbroken.memory.background DESCRIPTOR`: started by a worker that writes checkpoints to a disk."""

import os
import signal
import socket
import sys

import torch

from unbroken.logs import read_level, start_log
from unbroken.memory.background.writer import DiskWriter
from unbroken.memory.place import read_place

_LEAST_PRIORITY = 19


def main() -> int:
    """Write until the worker has ended."""
    # What was begun is finished: a signal to the worker's group is none to this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_LEAST_PRIORITY)
    torch.set_num_threads(1)
    start_log("unbroken.disk", read_level(os.environ), with_time=False)
    DiskWriter(socket.socket(fileno=int(sys.argv[1])), read_place().folder).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
