"""How the parts of a job encrypt what they say to each other: TLS 1.3, and the job's own authority as the only one."""

import ssl
from pathlib import Path

from unbroken_core.vocabulary.errors import InputError


def server_name(job: str, namespace: str) -> str:
    """Return the name that a rendezvous' certificate bears, however it is reached: its Service's in the cluster."""
    return f"{job}-rendezvous.{namespace}.svc"


def client_context(authorities: str) -> ssl.SSLContext:
    """Return what connects to a server whose name one of these authorities (PEM, one or several) vouches for.

    Raises InputError without the text, which may be anything.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=authorities)
    except (ssl.SSLError, ValueError) as error:
        raise InputError(
            f"want certificates of authorities in PEM, got {len(authorities)} characters: {error}"
        ) from error
    return context


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return what serves with a certificate and its key (PEM files). Raises InputError that names the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise InputError(f"{certificate}, {key}: want a certificate and its key in PEM: {error}") from error
    except OSError as error:
        missing = [path for path in (certificate, key) if not path.is_file()]
        raise InputError(f"{(missing or [certificate])[0]}: {error.strerror}") from error
    return context
