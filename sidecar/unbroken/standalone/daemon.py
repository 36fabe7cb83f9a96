"""Turns this process into nobody's child, which keeps nothing of its starter but a log."""

import os
import sys
from pathlib import Path

from unbroken_core.errors import InputError


def leave_starter(log_file: str) -> None:
    """Go on in a child in a session of its own; this process exits with 0.

    Call it before there are threads or an event loop. A pipe of the starter that stayed open would keep whoever reads
    it waiting for our end. Raises InputError when the log cannot be written.
    """
    try:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise InputError(f"log {log_file}: want a file that can be written, got: {error.strerror}") from error
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
