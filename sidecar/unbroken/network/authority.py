"""The certificate authority of the rendezvous: read from a file, and again when it changes."""

import ssl
import time
from collections.abc import Callable
from pathlib import Path

from unbroken_core.conventions.tls import client_context
from unbroken_core.vocabulary.errors import InputError

GRACE_S = 300.0
"""How long a replaced authority stays trusted: kubelets update the pods' files up to two minutes apart."""


class AuthorityFile:
    """Makes the TLS context of each new connection."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._newest = ""
        self._previous = ""
        self._replaced_at_s = 0.0
        self._trusted = ""
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection. Raises InputError that names the file."""
        text = self._read()
        if text != self._newest:
            # Check first: a file that is wrong for a moment must not replace a good one.
            self._make(text)
            self._previous, self._newest, self._replaced_at_s = self._newest, text, self._clock()
        is_previous_good = bool(self._previous) and self._clock() < self._replaced_at_s + GRACE_S
        trusted = f"{self._newest}\n{self._previous}" if is_previous_good else self._newest
        if self._context is None or trusted != self._trusted:
            self._context, self._trusted = self._make(trusted), trusted
        return self._context

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"authority file {self._path}: want certificates in PEM, got {error}") from error

    def _make(self, text: str) -> ssl.SSLContext:
        try:
            return client_context(text)
        except InputError as error:
            raise InputError(f"authority file {self._path}: {error}") from error
