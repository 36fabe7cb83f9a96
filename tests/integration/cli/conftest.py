"""The real API servers that UNBROKEN_TEST_KUBECONFIGS names."""

from pathlib import Path

import pytest
from tests.clusters import kubeconfig_of


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.cluster) for name in ("full", "modern")])
def kubeconfig(request: pytest.FixtureRequest) -> Path:
    """Kubeconfig of a real API server."""
    return kubeconfig_of(request.param)
