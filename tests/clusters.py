"""The real API servers that UNBROKEN_TEST_KUBECONFIGS names: a list of `name=path`, separated by `:`."""

import os
from pathlib import Path

import pytest


def kubeconfig_of(name: str) -> Path:
    """Return the kubeconfig of a real API server; skips the test when there is no such server."""
    entries = filter(None, os.environ.get("UNBROKEN_TEST_KUBECONFIGS", "").split(":"))
    path = dict(entry.split("=", 1) for entry in entries).get(name)
    if path is None:
        pytest.skip(f"UNBROKEN_TEST_KUBECONFIGS names no API server {name!r}")
    return Path(path)
