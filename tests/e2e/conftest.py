"""The clusters of the end-to-end tests: our own, and the real API servers that UNBROKEN_TEST_KUBECONFIGS names."""

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clusters import kubeconfig_of

from .e2e_bench import Bench, make_bench

PROFILES = ("local", "full", "modern")


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=() if name == "local" else pytest.mark.cluster) for name in PROFILES],
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A cluster with a running operator."""
    kubeconfig = None if request.param == "local" else kubeconfig_of(request.param)
    # Not pytest's folder: Unix sockets of the pods lie below it, and their paths are limited to 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ub-"))
    bench = make_bench(request.param, folder, kubeconfig)
    try:
        asyncio.run(bench.set_up())
        yield bench
    finally:
        asyncio.run(bench.tear_down())
        shutil.rmtree(folder, ignore_errors=True)
