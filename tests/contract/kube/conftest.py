"""The API servers that this suite runs against: the built-in one, and real ones named by UNBROKEN_TEST_KUBECONFIGS.

UNBROKEN_TEST_KUBECONFIGS is a list of `name=path` separated by `:`; the names are those of LACKS.
"""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kube_target import LACKS, Target, wait_until


def _given() -> dict[str, Path]:
    entries = filter(None, os.environ.get("UNBROKEN_TEST_KUBECONFIGS", "").split(":"))
    return {name: Path(path) for name, _, path in (entry.partition("=") for entry in entries)}


@pytest.fixture(scope="session")
def builtin_kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run the built-in server in a process of its own."""
    folder = tmp_path_factory.mktemp("apiserver")
    path = folder / "kubeconfig"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "unbroken_local.apiserver", "--kubeconfig", str(path), "--history", "400"],
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: path.exists() or process.poll() is not None, "the built-in server writes its kubeconfig")
        assert process.poll() is None, (folder / "log").read_text()
        yield path
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert "Traceback" not in (folder / "log").read_text()


@pytest.fixture(scope="session", params=["builtin", *LACKS])
def target(request: pytest.FixtureRequest) -> Target:
    """One API server; real ones are skipped where no kubeconfig is given."""
    name = str(request.param)
    if name == "builtin":
        return Target(name, request.getfixturevalue("builtin_kubeconfig"))
    path = _given().get(name)
    if path is None:
        pytest.skip(f"no entry {name}=KUBECONFIG in UNBROKEN_TEST_KUBECONFIGS")
    return Target(name, path)


@pytest.fixture
def namespace(target: Target) -> Iterator[str]:
    """A namespace of the test's own."""
    name = f"contract-{secrets.token_hex(4)}"
    reply = target.post("/api/v1/namespaces", {"metadata": {"name": name}})
    assert reply.code == 201, reply.body
    yield name
    target.delete(f"/api/v1/namespaces/{name}")
