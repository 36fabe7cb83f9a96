"""A job's own rendezvous, asked over HTTP: of `unbroken run`, or through a port that kubectl forwards."""

import urllib.error
import urllib.request
from pathlib import Path

from unbroken_cli.errors import CommandError
from unbroken_core import wire
from unbroken_core.errors import InputError, WireError
from unbroken_core.messages import JobStatus

_TIMEOUT_S = 10.0
_MAX_BYTES = 64 << 20


def read_status(url: str, token_file: Path) -> JobStatus:
    """Return what the rendezvous says. Raises InputError for a wrong argument, CommandError for no answer."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url: want http://ADDRESS:PORT, got {url!r}")
    try:
        token = token_file.read_text().strip()
    except OSError as error:
        raise InputError(f"--token-file {token_file}: {error.strerror}; want the file with the job's token") from error
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/status", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            status: JobStatus = wire.decode(response.read(_MAX_BYTES), JobStatus)
            return status
    except urllib.error.HTTPError as error:
        hint = "; want the token of this job, see --token-file" if error.code == 401 else ""
        raise CommandError(f"rendezvous {url}: it answers {error.code}{hint}") from error
    except WireError as error:
        raise CommandError(f"rendezvous {url}: unreadable answer: {error}; is it of another release?") from error
    except (OSError, ValueError) as error:
        raise CommandError(f"rendezvous {url}: no answer: {getattr(error, 'reason', None) or error}") from error
