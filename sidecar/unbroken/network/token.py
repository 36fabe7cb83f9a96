"""The token that callers must show: a fixed one, or one in a file, which is read again when it changes."""

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from unbroken_core.errors import InputError

logger = logging.getLogger(__name__)

_MIN_CHARACTERS = 16
GRACE_S = 300.0
"""How long a replaced token stays valid: kubelets update the pods' files up to two minutes apart."""


def read_token(path: Path) -> str:
    """Return the token in a file, for a header. Raises InputError that names the file, without its content."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"token file {path}: want the job's token in UTF-8, got {error}") from error
    return one_line(token, f"token file {path}")


def one_line(token: str, what: str) -> str:
    """Return the token. Raises InputError unless a header can carry it."""
    if not token.isascii() or not token.isprintable():
        raise InputError(f"{what}: want a token in one line of ASCII characters, got other characters")
    return token


class FixedToken:
    """Checks callers against a fixed token."""

    def __init__(self, token: str) -> None:
        """Raises InputError when the token is too short."""
        self._token = token.encode()
        _want_length(self._token, "token")

    def accepts(self, authorization: str) -> bool:
        """Return whether a header's value is `Bearer <token>`; takes the same time wherever it differs."""
        return _is_bearer(authorization, self._token)


class TokenFile:
    """Checks callers against the token in a file, and for GRACE_S against the one before it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file. Raises InputError when it cannot be read or its token is too short."""
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._token = b""
        self._previous = b""
        self._replaced_at_s = 0.0
        self._clock = clock
        self._read()

    def accepts(self, authorization: str) -> bool:
        """Return whether a header's value is `Bearer <token>`; takes the same time wherever it differs."""
        try:
            self._read()
        except InputError as error:
            # A rotation may remove the file for a moment: the old token stays valid until there is a new one.
            logger.warning("token kept: %s", error)
        previous = self._previous if self._has_grace() else self._token
        return _is_bearer(authorization, self._token, previous)

    def _has_grace(self) -> bool:
        return bool(self._previous) and self._clock() < self._replaced_at_s + GRACE_S

    def _read(self) -> None:
        try:
            now = self._path.stat()
            stamp = (now.st_ino, now.st_mtime_ns, now.st_size)
            if stamp == self._stamp:
                return
            token = self._path.read_bytes().strip()
        except OSError as error:
            raise InputError(f"token file {self._path}: {error.strerror}") from error
        _want_length(token, f"token file {self._path}")
        one_line(token.decode(errors="replace"), f"token file {self._path}")
        if self._token and token != self._token:
            self._previous, self._replaced_at_s = self._token, self._clock()
            logger.info("token replaced: the one before it is accepted for another %.0f s", GRACE_S)
        self._token, self._stamp = token, stamp


def _want_length(token: bytes, what: str) -> None:
    if len(token) < _MIN_CHARACTERS:
        raise InputError(f"{what}: want a token of at least {_MIN_CHARACTERS} characters, got {len(token)}")


def _is_bearer(authorization: str, *tokens: bytes) -> bool:
    scheme, _, presented = authorization.partition(" ")
    shown = presented.strip().encode(errors="replace")
    # Compare with all of them: the time must not show which one matched.
    is_same = [hmac.compare_digest(shown, token) for token in tokens]
    return scheme.lower() == "bearer" and any(is_same)
