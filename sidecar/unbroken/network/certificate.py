"""The certificate of the API: read from files, and again when they change."""

import logging
import ssl
from asyncio import sslproto
from pathlib import Path

from unbroken_core.conventions.tls import server_context
from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

_READ_BYTES = 16 << 10
"""asyncio reserves 256 KiB per encrypted connection, over 1 GiB for 4,096 agents, whose messages are short."""

_Stamps = tuple[tuple[int, int, int], ...]


class ServerCertificate:
    """Gives each new connection the newest certificate; open connections keep theirs."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files. Raises InputError when they cannot be read or do not match."""
        sslproto.SSLProtocol.max_size = _READ_BYTES
        self._files = (certificate, key)
        self._stamps = self._look()
        self._newest = self.context = server_context(*self._files)
        """The context to listen with; it delegates to the newest."""
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called at the start of each handshake."""
        try:
            stamps = self._look()
            if stamps != self._stamps:
                self._newest = server_context(*self._files)
                self._stamps = stamps
                logger.info("certificate replaced: file=%s", self._files[0])
        except InputError as error:
            # During a rotation the files may not match for a moment: the old certificate serves until they do.
            logger.warning("certificate kept: %s", error)
        connection.context = self._newest

    def _look(self) -> _Stamps:
        try:
            now = [path.stat() for path in self._files]
        except OSError as error:
            raise InputError(f"{error.filename}: {error.strerror}") from error
        return tuple((item.st_ino, item.st_mtime_ns, item.st_size) for item in now)
