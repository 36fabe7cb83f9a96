"""The rendezvous' settings. No other module of this package reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from unbroken.network.addresses import split_address
from unbroken_core.conventions.environment import needed
from unbroken_core.protocol.messages import Earlier
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import decode, settings_from_json
from unbroken_core.vocabulary.errors import InputError, WireError


@dataclass(frozen=True)
class RendezvousConfig:
    """Everything that a rendezvous needs to start."""

    settings: JobSettings
    job_key_file: Path | None
    """File with the key that the tokens of all callers follow from."""
    token_file: Path | None
    """Without a job key: file with the one token that all callers show."""
    listen: tuple[str, int]
    metrics_listen: tuple[str, int] | None
    """None: no metrics are served."""
    certificate: tuple[Path, Path] | None
    """Certificate and key that the API is served with; None: it is served in clear."""
    earlier: Earlier
    folder: Path | None
    """Where what must outlive the process is kept; None: nowhere."""


def read_config(environment: Mapping[str, str] | None = None) -> RendezvousConfig:
    """Read the environment. Raises InputError that names the variable."""
    source = os.environ if environment is None else environment
    want = partial(needed, source)
    metrics = source.get("UNBROKEN_METRICS_LISTEN", "")
    return RendezvousConfig(
        settings=settings_from_json(want("UNBROKEN_SETTINGS")),
        job_key_file=Path(source["UNBROKEN_JOB_KEY_FILE"]) if source.get("UNBROKEN_JOB_KEY_FILE") else None,
        token_file=Path(source["UNBROKEN_TOKEN_FILE"]) if source.get("UNBROKEN_TOKEN_FILE") else None,
        listen=split_address("UNBROKEN_LISTEN", want("UNBROKEN_LISTEN")),
        metrics_listen=split_address("UNBROKEN_METRICS_LISTEN", metrics) if metrics else None,
        certificate=_certificate(source),
        earlier=_earlier(source.get("UNBROKEN_EARLIER", "")),
        folder=Path(source["UNBROKEN_DIR"]) if source.get("UNBROKEN_DIR") else None,
    )


def loopback_beside(host: str) -> str | None:
    """Return where `kubectl port-forward` comes to, not a pod's own address; None where `host` has it already."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if address.is_loopback or address.is_unspecified:
        return None
    return "127.0.0.1" if address.version == 4 else "::1"


def _certificate(source: Mapping[str, str]) -> tuple[Path, Path] | None:
    names = ("UNBROKEN_TLS_CERTIFICATE", "UNBROKEN_TLS_KEY")
    certificate, key = (source.get(name, "") for name in names)
    if bool(certificate) is not bool(key):
        raise InputError(f"{names[0]}, {names[1]}: want both or none, got {certificate!r} and {key!r}")
    return (Path(certificate), Path(key)) if certificate else None


def _earlier(text: str) -> Earlier:
    if not text:
        return Earlier()
    try:
        earlier: Earlier = decode(text, Earlier)
    except WireError as error:
        raise InputError(f"UNBROKEN_EARLIER: {error}") from error
    return earlier
