"""The keeper's settings. No other module of this package reads the environment."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unbroken_core.conventions.environment import needed
from unbroken_core.pod.memory_slots import DIGEST_BYTES
from unbroken_core.protocol.settings import MAX_RANKS_PER_POD
from unbroken_core.protocol.wire import settings_from_json
from unbroken_core.vocabulary.errors import InputError

MAX_LIMIT_BYTES = 1 << 50


@dataclass(frozen=True)
class KeeperConfig:
    """Everything that a keeper needs to start."""

    socket_folder: Path
    """The pod's folder, with the agent's socket."""
    root: Path
    """Folder on a tmpfs; one folder below it is this pod's."""
    pod_uid: str
    limit_bytes: int
    """What the slots of this pod may take in all."""
    ranks_per_pod: int
    job: bytes
    """Digest of the job's uid."""
    host: str = ""
    """The pod's address, at which keepers of other pods reach this one."""
    port: int = 0
    """0: any."""
    copy_bytes_per_s: float = 0.0
    """Of checkpoints that are copied to one other pod, on average; 0: no limit."""


def read_config(environment: Mapping[str, str] | None = None) -> KeeperConfig:
    """Read the environment. Raises InputError that names the variable."""
    source = os.environ if environment is None else environment
    want = partial(needed, source)
    settings = settings_from_json(want("UNBROKEN_SETTINGS"))
    uid = want("UNBROKEN_POD_UID")
    if uid in (".", "..") or "/" in uid or "\0" in uid or len(uid) > 200:
        raise InputError(f"UNBROKEN_POD_UID: want a name for a folder, got {uid[:200]!r}")
    return KeeperConfig(
        socket_folder=Path(want("UNBROKEN_DIR")),
        root=Path(want("UNBROKEN_MEMORY_DIR")),
        pod_uid=uid,
        limit_bytes=read_limit("UNBROKEN_MEMORY_LIMIT", want("UNBROKEN_MEMORY_LIMIT")),
        ranks_per_pod=min(settings.ranks_per_pod, MAX_RANKS_PER_POD),
        host=source.get("UNBROKEN_POD_IP", ""),
        port=read_port(source),
        copy_bytes_per_s=_read_number(source, "UNBROKEN_MEMORY_COPY_RATE", MAX_LIMIT_BYTES),
        job=hashlib.sha256((settings.uid or settings.job).encode()).digest()[:DIGEST_BYTES],
    )


def read_port(source: Mapping[str, str]) -> int:
    """Return where keepers of other pods shall reach this one; 0: at any port. Raises InputError."""
    return _read_number(source, "UNBROKEN_MEMORY_PORT", (1 << 16) - 1)


def _read_number(source: Mapping[str, str], name: str, most: int) -> int:
    """Return a number that may be missing, 0 then. Raises InputError."""
    text = source.get(name, "") or "0"
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) <= most):
        raise InputError(f"{name}: want 0 to {most}, got {text[:100]!r}")
    return int(text)


def read_limit(name: str, text: str) -> int:
    """Return the bytes that `text` says. Raises InputError with the name of the variable."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and 0 < int(text) <= MAX_LIMIT_BYTES):
        raise InputError(f"{name}: want 1 to {MAX_LIMIT_BYTES} bytes, got {text[:100]!r}")
    return int(text)
