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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give all tests with a cluster to one process of pytest-xdist, one after the other.

    Two would run two kubelets for the same nodes, and these jobs want the machine for themselves. What else is here
    has no cluster, waits most of the time, and runs beside them.
    """
    for item in items:
        if isinstance(item, pytest.Function) and "bench" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("with a cluster"))


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
