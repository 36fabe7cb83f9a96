"""Ports for what listens later."""

import contextlib
import itertools
import random
import socket

_PORTS = range(16384, 24576)
# In an order of this process' own, so that others that look at the same time seldom find the same.
_order = itertools.cycle(random.SystemRandom().sample(_PORTS, len(_PORTS)))


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free just now, another one each time.

    None of those from which the kernel takes one for every connection: it is listened at seconds later, or again.
    """
    while True:
        port = next(_order)
        with socket.socket() as listening, contextlib.suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return port
