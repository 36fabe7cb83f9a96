"""The clusters of the end-to-end tests: our own, and the real API servers that UNBROKEN_TEST_KUBECONFIGS names."""

import asyncio
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clusters import kubeconfig_of
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped] # it has no types

from .e2e_bench import FULL, MODERN, OUR_OWN, Bench, make_bench

PROFILES = ("local", "full", "modern")
_WITH_CLUSTER = re.compile(rf"\[({'|'.join(PROFILES)})\b")


class TwoClustersAtATime(LoadScopeScheduling):  # type: ignore[misc] # it has no types
    """Gives all tests with our own cluster to one process, and all with a real API server to another.

    Each cluster has its own block of loopback addresses; two kubelets for the nodes of one API server would be one too
    many, and these jobs wait more than they work. What else is here has no cluster, and runs beside them. (The marks
    of `--dist loadgroup` come to nothing with pytest 9.2.)
    """

    def _split_scope(self, nodeid: str) -> str:
        found = _WITH_CLUSTER.search(nodeid)
        if found is None:
            return nodeid
        return "our own cluster" if found[1] == "local" else "real API servers"


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TwoClustersAtATime:
    """Choose it, whatever `--dist` says."""
    return TwoClustersAtATime(config, log)


@pytest.fixture(scope="session", params=[OUR_OWN, FULL, MODERN])
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
