"""The job's token: read from a file, and read again when the file changes."""

import hmac
import logging
from pathlib import Path

from unbroken_core.errors import InputError

logger = logging.getLogger(__name__)

_MIN_CHARACTERS = 16


class TokenFile:
    """Checks what callers present against the token in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises InputError when it cannot be read, or its token is too short to be one."""
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._token = b""
        self._read()

    def accepts(self, authorization: str) -> bool:
        """Return whether a header's value is `Bearer <token>`; takes the same time wherever it differs."""
        try:
            self._read()
        except InputError as error:
            # A rotation may remove the file for a moment; the old token holds until there is a new one.
            logger.warning("token kept: %s", error)
        scheme, _, presented = authorization.partition(" ")
        is_same = hmac.compare_digest(presented.strip().encode(errors="replace"), self._token)
        return scheme.lower() == "bearer" and is_same

    def _read(self) -> None:
        try:
            now = self._path.stat()
            stamp = (now.st_ino, now.st_mtime_ns, now.st_size)
            if stamp == self._stamp:
                return
            token = self._path.read_bytes().strip()
        except OSError as error:
            raise InputError(f"UNBROKEN_TOKEN_FILE: {self._path}: {error.strerror}") from error
        if len(token) < _MIN_CHARACTERS:
            raise InputError(f"{self._path}: want a token of at least {_MIN_CHARACTERS} characters, got {len(token)}")
        self._token, self._stamp = token, stamp
