"""The watch's settings. No other module of this package reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.watch.checks.probe import Probe, read_probes
from unbroken.watch.checks.storage import MAX_PATHS
from unbroken_core.pod.fault_orders import is_allowed
from unbroken_core.vocabulary.errors import InputError


@dataclass(frozen=True)
class WatchConfig:
    """Everything that a watch needs to start."""

    directory: Path
    """Folder with the agent's socket."""
    root: Path
    """Where /sys, /proc and /dev of the node are."""
    visible_devices: str
    storage: tuple[str, ...]
    """Paths that are looked at."""
    probes: tuple[Probe, ...]
    """Commands that look at more."""
    allows_faults: bool = False
    """Whether it finds what `unbroken inject` orders."""


def read_config(environment: Mapping[str, str] | None = None) -> WatchConfig:
    """Read the environment. Raises InputError that names what is wrong."""
    source = os.environ if environment is None else environment
    directory = source.get("UNBROKEN_DIR", "")
    if not directory:
        raise InputError("UNBROKEN_DIR: want a folder, got nothing")
    paths = tuple(path for path in source.get("UNBROKEN_WATCH_STORAGE", "").split(":") if path)
    if len(paths) > MAX_PATHS or not all(path.startswith("/") for path in paths):
        raise InputError(f"UNBROKEN_WATCH_STORAGE: want at most {MAX_PATHS} absolute paths, got {paths}")
    return WatchConfig(
        Path(directory),
        Path(source.get("UNBROKEN_WATCH_ROOT") or "/"),
        source.get("NVIDIA_VISIBLE_DEVICES", ""),
        paths,
        read_probes(source.get("UNBROKEN_WATCH_PROBES", "")),
        is_allowed(source),
    )
