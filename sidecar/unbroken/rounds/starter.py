"""Starts a rendezvous on this host: a detached process that ends when it is idle."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

_LISTEN_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Starter:
    """Options of that process."""

    host: str
    port: int
    token_file: str
    """"": `token` says it."""
    token: Callable[[], str]
    certificate: str = ""
    key: str = ""
    log_file: str = ""
    """"" logs nothing."""

    def __call__(self, known: str) -> str:
        """Start it with what is known of earlier rounds (JSON, or ""); return what went wrong, "" where it listens.

        If another node was quicker, the port is taken; that is no error: the next connection will show it.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        command = [sys.executable, "-m", "unbroken.rounds", f"--listen={host}:{self.port}", "--until-idle"]
        command += [f"--token-file={self.token_file or '-'}", f"--log-file={self.log_file or os.devnull}"]
        if known:
            command.append(f"--known={known}")
        if self.certificate:
            command += [f"--certificate={self.certificate}", f"--key={self.key}"]
        try:
            text = "" if self.token_file else self.token()
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, timeout=_LISTEN_TIMEOUT_S, check=False
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return str(error)
        return "" if done.returncode == 0 else done.stderr.strip()[-500:] or f"exit code {done.returncode}"


def is_local(host: str) -> bool:
    """Return whether a name or address is one of this host's."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(_can_bind(family, address) for family, _type, _protocol, _name, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
            return True
    except OSError:
        return False
