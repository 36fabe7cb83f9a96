"""The tokens that callers must show: checked against a job's key or against one plain token, and read from files.

Both lie in files that are read again when they change; what was replaced is accepted for GRACE_S more.
"""

import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unbroken_core.conventions.tokens import MAX_CHARACTERS, Kind, checked_secret, claim_of, derive_token
from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

GRACE_S = 300.0
"""How long what was replaced stays valid: kubelets update the pods' files up to two minutes apart."""
_MAX_FILE_BYTES = 2 * MAX_CHARACTERS


@dataclass(frozen=True)
class Caller:
    """Who has shown a token that is accepted."""

    kind: Kind | None
    """None: bearer of the one plain token of a job without a key, who may do everything."""
    pod: str = ""
    """The one pod for which an agent may speak; "" for others."""
    secret_number: int = 0
    """Which key or token it was accepted with: they are numbered as they come."""
    is_outgoing: bool = False
    """Whether that key or token was replaced, and is accepted for a moment only."""


class Verifier(Protocol):
    """Knows the tokens."""

    def accepts(self, authorization: str) -> Caller | None:
        """Return who shows this value of an Authorization header; None: nobody who is known."""

    def oldest(self) -> int:
        """Return the number of the oldest key or token that is still accepted."""

    def job_keys(self) -> tuple[str, ...]:
        """Return the job's keys that are valid now, the newest first; none for a job without."""


class FixedToken:
    """Checks callers against a fixed plain token."""

    def __init__(self, token: str) -> None:
        """Raises InputError when it is no token."""
        self._token = checked_secret(token, "token").encode()

    def accepts(self, authorization: str) -> Caller | None:
        """Return the caller; takes the same time wherever the token differs."""
        return Caller(None) if hmac.compare_digest(_shown(authorization), self._token) else None

    def oldest(self) -> int:
        """Return 0: it is never replaced."""
        return 0

    def job_keys(self) -> tuple[str, ...]:
        """Return none: it is no key."""
        return ()


class _SecretFile:
    """What a file holds, and for GRACE_S what it held before."""

    def __init__(self, path: Path, what: str, clock: Callable[[], float]) -> None:
        """Read the file. Raises InputError when it cannot be read or holds no token."""
        self._path = path
        self._what = what
        self._clock = clock
        self._stamp: tuple[int, int, int] | None = None
        self._number = 0
        self._complaint = ""
        self._replaced_at_s = 0.0
        self._previous = ""
        self._present = ""
        self._read()

    def valid(self) -> tuple[tuple[int, str], ...]:
        """Return what is accepted now, with its number; the newest first."""
        try:
            self._read()
            self._complaint = ""
        except InputError as error:
            # A rotation may remove the file for a moment: what was in it stays valid until there is something new.
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.warning("%s kept: %s", self._what, error)
        if self._previous and self._clock() >= self._replaced_at_s + GRACE_S:
            self._previous = ""
        present = (self._number, self._present)
        return (present, (self._number - 1, self._previous)) if self._previous else (present,)

    def _read(self) -> None:
        stamp = _stamp(self._path, self._what)
        if stamp == self._stamp:
            return
        text = read_token(self._path, f"{self._what} file")
        if self._present and text != self._present:
            self._previous, self._replaced_at_s = self._present, self._clock()
            self._number += 1
            logger.info("%s replaced: the one before it is accepted for another %.0f s", self._what, GRACE_S)
        self._present, self._stamp = text, stamp


class TokenFile:
    """Checks callers against the plain token in a file, and for GRACE_S against the one before it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file. Raises InputError when it cannot be read or holds no token."""
        self._file = _SecretFile(path, "token", clock)

    def accepts(self, authorization: str) -> Caller | None:
        """Return the caller; takes the same time wherever the token differs."""
        shown, valid = _shown(authorization), self._file.valid()
        # Compare with all of them: the time must not show which one matched.
        found = [number for number, token in valid if hmac.compare_digest(shown, token.encode())]
        return Caller(None, "", found[0], found[0] < valid[0][0]) if found else None

    def oldest(self) -> int:
        """Return the number of the oldest token that is still accepted."""
        return self._file.valid()[-1][0]

    def job_keys(self) -> tuple[str, ...]:
        """Return none: every pod knows this token."""
        return ()


class JobKeyFile:
    """Checks callers against the tokens that follow from the job's key in a file, and for GRACE_S from the one before.

    `uid` is the job's: a token of another job with the same key would not do.
    """

    def __init__(self, path: Path, uid: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file. Raises InputError when it cannot be read or holds no key."""
        self._file = _SecretFile(path, "job key", clock)
        self._uid = uid

    def accepts(self, authorization: str) -> Caller | None:
        """Return the caller; takes the same time wherever the token differs."""
        shown = _shown(authorization)
        claim = claim_of(shown.decode("latin-1"))
        if claim is None:
            return None
        kind, pod = claim
        valid = self._file.valid()
        derived = [(number, derive_token(key, kind, self._uid, pod)) for number, key in valid]
        found = [number for number, token in derived if hmac.compare_digest(shown, token.encode(errors="replace"))]
        return Caller(kind, pod, found[0], found[0] < valid[0][0]) if found else None

    def oldest(self) -> int:
        """Return the number of the oldest key that is still accepted."""
        return self._file.valid()[-1][0]

    def job_keys(self) -> tuple[str, ...]:
        """Return the keys that are valid now, the newest first."""
        return tuple(key for _, key in self._file.valid())


def read_token(path: Path, what: str = "token file") -> str:
    """Return the key or token in a file. Raises InputError that says which file, and never what is in it."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{what} {path}: {getattr(error, 'strerror', None) or error}") from error
    return checked_secret(content, f"{what} {path}")


def write_private(path: Path, text: str) -> None:
    """Write a file that this user alone may read, from its first byte on."""
    path.touch(mode=0o600)
    path.write_text(text)


def _stamp(path: Path, what: str) -> tuple[int, int, int]:
    try:
        now = path.stat()
    except (OSError, ValueError) as error:
        raise InputError(f"{what} file {path}: {getattr(error, 'strerror', None) or error}") from error
    return (now.st_ino, now.st_mtime_ns, now.st_size)


def _shown(authorization: str) -> bytes:
    """Return the token that a header's value carries; b"" for none, which is never one."""
    scheme, _, presented = authorization.partition(" ")
    shown = presented.strip()
    is_token = scheme.lower() == "bearer" and len(shown) <= MAX_CHARACTERS and shown.isascii()
    return shown.encode() if is_token else b""
