"""The clusters that these tests run on: our kubelet with our API server, and with the real ones that are given."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clusters import kubeconfig_of

from .local_bench import FORCE, Bench, Space, new_name, unbroken_local

NODES = """
- {name: gpu-1, labels: {rack: a}, allocatable: {nvidia.com/gpu: 8}}
- {name: gpu-2, labels: {rack: b}, allocatable: {nvidia.com/gpu: 8}}
- {name: cpu-1, taints: [{key: cpu-only, effect: NoSchedule}]}
"""


class Benches:
    """Starts each cluster when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, Bench] = {}

    def get(self, name: str) -> Bench:
        if name not in self._running:
            options = []
            if name != "builtin":
                options = ["--api-server", str(kubeconfig_of(name))]
            nodes = self._folder / "nodes.yaml"
            nodes.write_text(NODES)
            directory = self._folder / name
            done = unbroken_local(
                "up", "--nodes", str(nodes), "--dir", str(directory), "--back-off", "0.2", "--node-grace", "3", *options
            )
            assert done.returncode == 0, done.stderr
            self._running[name] = bench = Bench(name, directory)
            bench.connect()
        return self._running[name]

    def close(self) -> None:
        for bench in self._running.values():
            bench.close()
            done = unbroken_local("down", "--dir", str(bench.directory))
            assert done.returncode == 0, done.stderr
            assert "Traceback" not in (bench.directory / "cluster.log").read_text()


@pytest.fixture(scope="session")
def benches() -> Iterator[Benches]:
    folder = Path(tempfile.mkdtemp(prefix="ub-test-"))
    benches = Benches(folder)
    try:
        yield benches
    finally:
        benches.close()
        shutil.rmtree(folder)


def _space(bench: Bench, folder: Path) -> Iterator[Space]:
    name = new_name("t")
    bench.create("/api/v1/namespaces", {"metadata": {"name": name}})
    space = Space(bench, name, folder)
    yield space
    for pod in (bench.get(space.pods) or {}).get("items", []):
        bench.delete(f"{space.pods}/{pod['metadata']['name']}", FORCE)
    bench.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(params=["builtin", *(pytest.param(n, marks=pytest.mark.cluster) for n in ("full", "modern"))])
def space(request: pytest.FixtureRequest, benches: Benches, tmp_path: Path) -> Iterator[Space]:
    """A namespace on each control plane."""
    yield from _space(benches.get(request.param), tmp_path)


@pytest.fixture(params=["builtin", pytest.param("modern", marks=pytest.mark.cluster)])
def sidecar_space(request: pytest.FixtureRequest, benches: Benches, tmp_path: Path) -> Iterator[Space]:
    """A namespace on each control plane that knows native sidecars; our own scheduler and node lifecycle run there."""
    yield from _space(benches.get(request.param), tmp_path)


@pytest.fixture
def builtin_space(benches: Benches, tmp_path: Path) -> Iterator[Space]:
    """A namespace on our own API server."""
    yield from _space(benches.get("builtin"), tmp_path)
