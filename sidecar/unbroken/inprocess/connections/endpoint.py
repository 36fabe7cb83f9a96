"""The listening socket that a worker binds before it reports READY, and the store that active rank 0 serves from it."""

import datetime
import socket
from typing import Any

BACKLOG = 4096
"""Backlog for ranks that connect before rank 0 serves; the kernel caps it at net.core.somaxconn."""

STORE_TIMEOUT = datetime.timedelta(minutes=5)


class Endpoint:
    """A socket on a port that the system chose: iterations and workers cannot collide."""

    def __init__(self, host: str) -> None:
        """Bind and listen. Raises OSError when the address is not this host's."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((host, 0))
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self.host = host
        self.port = int(self._socket.getsockname()[1])
        self._store: Any = None

    def serve(self, timeout: datetime.timedelta = STORE_TIMEOUT) -> None:
        """Start a TCPStore on the socket, which it owns from now on; harmless when repeated."""
        if self._store is not None:
            return
        import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

        self._store = dist.TCPStore(  # type: ignore[attr-defined] # torch does not export it by name
            self.host,
            self.port,
            world_size=None,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )

    def close(self) -> list[Any]:
        """Close the socket, or hand over the store that owns it: dropping a store waits for its thread."""
        self._socket.close()
        store, self._store = self._store, None
        return [] if store is None else [store]

    def forget(self) -> None:
        """Close the socket in a forked child; a store is kept, as its thread does not exist there to be joined."""
        self._socket.close()
