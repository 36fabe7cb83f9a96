"""What a rendezvous is told by its environment; the only place of this package that reads it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.exposition import split_address
from unbroken_core.errors import InputError
from unbroken_core.settings import JobSettings
from unbroken_core.wire import settings_from_json


@dataclass(frozen=True)
class RendezvousConfig:
    """Everything that a rendezvous needs to start."""

    settings: JobSettings
    token_file: Path
    listen: tuple[str, int]
    metrics_listen: tuple[str, int] | None
    """None: no metrics are served."""


def read_config(environment: Mapping[str, str] | None = None) -> RendezvousConfig:
    """Read the environment. Raises InputError that names the variable."""
    source = os.environ if environment is None else environment

    def want(name: str) -> str:
        value = source.get(name, "")
        if not value:
            raise InputError(f"{name}: want a value in the environment, got nothing")
        return value

    metrics = source.get("UNBROKEN_METRICS_LISTEN", "")
    return RendezvousConfig(
        settings=settings_from_json(want("UNBROKEN_SETTINGS")),
        token_file=Path(want("UNBROKEN_TOKEN_FILE")),
        listen=split_address("UNBROKEN_LISTEN", want("UNBROKEN_LISTEN")),
        metrics_listen=split_address("UNBROKEN_METRICS_LISTEN", metrics) if metrics else None,
    )
