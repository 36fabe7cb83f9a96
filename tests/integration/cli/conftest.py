"""The real API servers that UNBROKEN_TEST_KUBECONFIGS names."""

import os
from pathlib import Path

import pytest


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.cluster) for name in ("full", "modern")])
def kubeconfig(request: pytest.FixtureRequest) -> Path:
    """Kubeconfig of a real API server."""
    pairs = dict(pair.split("=", 1) for pair in os.environ.get("UNBROKEN_TEST_KUBECONFIGS", "").split(":") if pair)
    if request.param not in pairs:
        pytest.skip(f"UNBROKEN_TEST_KUBECONFIGS names no API server {request.param!r}")
    return Path(pairs[request.param])
