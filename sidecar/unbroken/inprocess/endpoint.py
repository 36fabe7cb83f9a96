"""The listening socket that a worker binds before it says READY, and the store that active rank 0 serves from it."""

import datetime
import socket
from typing import Any

BACKLOG = 4096
"""Ranks that connect before rank 0 serves wait here; the kernel caps it at net.core.somaxconn."""

STORE_TIMEOUT = datetime.timedelta(minutes=5)


class Endpoint:
    """A socket on a port that the system chose, so that no two iterations or workers can collide."""

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

    def serve(self, timeout: datetime.timedelta = STORE_TIMEOUT) -> Any:
        """Start a TCPStore on the socket, which it owns from now on, and return it."""
        import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

        return dist.TCPStore(  # type: ignore[attr-defined]
            self.host,
            self.port,
            world_size=None,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )

    def close(self) -> None:
        """Close the socket, unless a store owns it."""
        self._socket.close()
