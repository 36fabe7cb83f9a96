"""The certificate that the API is served with: read from files, and read again when they change."""

import logging
import ssl
from asyncio import sslproto
from pathlib import Path

from unbroken_core.conventions.tls import server_context
from unbroken_core.errors import InputError

logger = logging.getLogger(__name__)

_READ_BYTES = 16 << 10
"""asyncio sets 256 KiB aside to read each encrypted connection, over 1 GiB for 4,096 agents, whose words are short."""

_Stamps = tuple[tuple[int, int, int], ...]


class ServerCertificate:
    """Serves each new connection with the newest certificate; those that are open stay as they are."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files. Raises InputError when they cannot be read, or do not belong together."""
        sslproto.SSLProtocol.max_size = _READ_BYTES
        self._files = (certificate, key)
        self._stamps = self._look()
        self._newest = self.context = server_context(*self._files)
        """What to listen with; it hands over to the newest."""
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called at the begin of each handshake."""
        try:
            stamps = self._look()
            if stamps != self._stamps:
                self._newest = server_context(*self._files)
                self._stamps = stamps
                logger.info("certificate replaced: file=%s", self._files[0])
        except InputError as error:
            # A rotation may leave the files apart for a moment; the former holds until there is a new one.
            logger.warning("certificate kept: %s", error)
        connection.context = self._newest

    def _look(self) -> _Stamps:
        try:
            now = [path.stat() for path in self._files]
        except OSError as error:
            raise InputError(f"{error.filename}: {error.strerror}") from error
        return tuple((item.st_ino, item.st_mtime_ns, item.st_size) for item in now)
