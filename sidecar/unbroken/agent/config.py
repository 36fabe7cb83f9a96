"""The agent's settings. No other module of this package reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unbroken.network.addresses import split_address
from unbroken_core.conventions.environment import needed
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import settings_from_json
from unbroken_core.vocabulary.errors import InputError


@dataclass(frozen=True)
class MemoryConfig:
    """Where a pod's keeper has its slots, and how much they may take."""

    root: Path
    limit_bytes: int
    port: int = 0
    """At which keepers of other pods reach this one, if the job copies checkpoints; 0: any."""


@dataclass(frozen=True)
class AgentConfig:
    """Everything that an agent needs to start."""

    settings: JobSettings
    token_file: Path
    rendezvous_url: str
    authority_file: Path | None
    """Certificate authority of a rendezvous at https://; None for plain http."""
    metrics_listen: tuple[str, int] | None
    """None: no metrics are served."""
    pod: str
    pod_uid: str
    node: str
    pod_ip: str
    domains: tuple[str, ...]
    directory: Path
    """Shared with launcher and workers: whatever is in it, they may have written."""
    private_directory: Path
    """The agent's own: it believes what it finds there. The same as `directory` where nobody has made another."""
    termination_log: Path | None = None
    """File in which the kubelet finds why this container ended."""
    waits_for_workers: bool = False
    """Join the job only once every living worker is READY: without a launcher nobody says how many will come, and the
    first plan would leave out the late ones."""
    memory: MemoryConfig | None = None
    """None: a job without checkpoints in memory, and without a keeper."""


def read_config(environment: Mapping[str, str] | None = None) -> AgentConfig:
    """Read the environment. Raises InputError that names the variable."""
    source = os.environ if environment is None else environment
    want = partial(needed, source)
    url = want("UNBROKEN_RENDEZVOUS_URL")
    if not url.startswith(("http://", "https://")):
        raise InputError(f"UNBROKEN_RENDEZVOUS_URL: want http://host:port or https://host:port, got {url!r}")
    is_encrypted = url.startswith("https://")
    listen = source.get("UNBROKEN_METRICS_LISTEN", "")
    domains = source.get("UNBROKEN_DOMAINS", "")
    directory = Path(want("UNBROKEN_DIR"))
    termination_log = source.get("UNBROKEN_TERMINATION_LOG", "")
    return AgentConfig(
        settings=settings_from_json(want("UNBROKEN_SETTINGS")),
        token_file=Path(want("UNBROKEN_TOKEN_FILE")),
        rendezvous_url=url.rstrip("/"),
        authority_file=Path(want("UNBROKEN_RENDEZVOUS_CA")) if is_encrypted else None,
        metrics_listen=split_address("UNBROKEN_METRICS_LISTEN", listen) if listen else None,
        pod=want("UNBROKEN_POD"),
        pod_uid=want("UNBROKEN_POD_UID"),
        node=source.get("UNBROKEN_NODE", ""),
        pod_ip=want("UNBROKEN_POD_IP"),
        domains=tuple(domains.split("/")) if domains else (),
        directory=directory,
        private_directory=Path(source.get("UNBROKEN_PRIVATE_DIR") or directory),
        termination_log=Path(termination_log) if termination_log else None,
        memory=_read_memory(source),
    )


def _read_memory(source: Mapping[str, str]) -> MemoryConfig | None:
    root = source.get("UNBROKEN_MEMORY_DIR", "")
    if not root:
        return None
    from unbroken.keeper.config import read_limit, read_port  # noqa: PLC0415 - a job without memory loads nothing of it

    limit_bytes = read_limit("UNBROKEN_MEMORY_LIMIT", source.get("UNBROKEN_MEMORY_LIMIT", ""))
    return MemoryConfig(Path(root), limit_bytes, read_port(source))
