"""A job's own rendezvous, asked over HTTP: of `unbroken run`, or through a port that kubectl forwards."""

import http.client
import ssl
from pathlib import Path

from unbroken_cli.errors import CommandError
from unbroken_cli.fetching import fetch
from unbroken_core.conventions.tls import client_context
from unbroken_core.conventions.tokens import MAX_CHARACTERS, checked_secret
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.errors import InputError, WireError

_TIMEOUT_S = 10.0
_MAX_TOKEN_BYTES = 2 * MAX_CHARACTERS


def read_status(url: str, token_file: Path, ca_file: Path | None, name: str = "") -> JobStatus:
    """Return what the rendezvous says. Raises InputError for a wrong argument, CommandError for no answer.

    `name`: that which its certificate must bear, however it is reached; "" for the URL's host.
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url: must be http://ADDRESS:PORT or https://..., got {url!r}")
    if url.startswith("https://") and ca_file is None:
        raise InputError("--url https://...: needs --ca-file, the job's authority (ca.crt of its Secret)")
    token = read_token(token_file)
    context = None if ca_file is None else _trust(ca_file)
    try:
        answer = fetch(url, "/v1/status", {"Authorization": f"Bearer {token}"}, _TIMEOUT_S, context, server_name=name)
        if answer.status != 200:
            hint = "; give the token of this job with --token-file" if answer.status == 401 else ""
            raise CommandError(f"rendezvous {url}: it answers {answer.status}{hint}")
        status: JobStatus = wire.decode(answer.body, JobStatus)
        return status
    except WireError as error:
        raise CommandError(f"rendezvous {url}: unreadable answer: {error}; is it of another release?") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        hint = ""
        if isinstance(error, ssl.SSLCertVerificationError) and "match" in str(error) and not name:
            hint = "; its certificate has the job's name: give JOB and -n NAMESPACE, too"
        raise CommandError(f"rendezvous {url}: no answer: {str(error) or type(error).__name__}{hint}") from error


def read_token(token_file: Path) -> str:
    """Return the token in a file. Raises InputError that says what is wrong, and never what is in it."""
    try:
        with token_file.open("rb") as file:
            content = file.read(_MAX_TOKEN_BYTES)
    except FileNotFoundError as error:
        raise InputError(
            f"--token-file {token_file}: there is no such file; that of `unbroken run` goes when the run is over, "
            "whose output says how it ended"
        ) from error
    except OSError as error:
        raise InputError(f"--token-file {token_file}: {error.strerror}; give the file with the job's token") from error
    return checked_secret(content, f"--token-file {token_file}")


def _trust(ca_file: Path) -> ssl.SSLContext:
    try:
        return client_context(ca_file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--ca-file {ca_file}: not certificates in PEM: {error}") from error
    except InputError as error:
        raise InputError(f"--ca-file {ca_file}: {error}") from error
