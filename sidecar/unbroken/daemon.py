"""Detaches this process from the one that started it; all that remains is a log."""

import os
import sys
from pathlib import Path

from unbroken_core.vocabulary.errors import InputError


def leave_starter(log_file: str) -> None:
    """Continue in a child with a session of its own; this process exits with 0.

    Call it before there are threads or an event loop. It closes the starter's pipes: their readers would wait for the
    end of this process. Raises InputError when the log cannot be written.
    """
    try:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise InputError(f"log {log_file} cannot be written: {error.strerror}") from error
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
