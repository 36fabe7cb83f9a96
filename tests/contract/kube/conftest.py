"""The API servers that this suite runs against: the built-in one, and real ones named by UNBROKEN_TEST_KUBECONFIGS.

UNBROKEN_TEST_KUBECONFIGS is a list of `name=path` separated by `:`; the names are those of LACKS.
"""

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clusters import kubeconfig_of
from tests.waiting import LIMIT_S, wait_until

from .kube_target import LACKS, Target, pod


@pytest.fixture(scope="session")
def builtin_kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run the built-in server in a process of its own."""
    folder = tmp_path_factory.mktemp("apiserver")
    path = folder / "kubeconfig"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "unbroken_local.apiserver", "--kubeconfig", str(path), "--history", "200"],
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: path.exists() or process.poll() is not None, "the built-in server writes its kubeconfig")
        assert process.poll() is None, (folder / "log").read_text()
        yield path
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        assert "Traceback" not in (folder / "log").read_text()


@pytest.fixture(scope="session", params=["builtin", *(pytest.param(name, marks=pytest.mark.cluster) for name in LACKS)])
def target(request: pytest.FixtureRequest) -> Target:
    """One API server; real ones are skipped where no kubeconfig is given."""
    name = str(request.param)
    if name == "builtin":
        return Target(name, request.getfixturevalue("builtin_kubeconfig"))
    return Target(name, kubeconfig_of(name))


@pytest.fixture
def namespace(target: Target) -> Iterator[str]:
    """A namespace of the test's own."""
    name = f"contract-{secrets.token_hex(4)}"
    reply = target.post("/api/v1/namespaces", {"metadata": {"name": name}})
    assert reply.code == 201, reply.body
    # Where service accounts have tokens, a pod is refused until they are made.
    pods = f"/api/v1/namespaces/{name}/pods"
    wait_until(lambda: target.post(pods, pod("probe"), dryRun="All").code == 201, "the namespace takes pods")
    yield name
    target.delete(f"/api/v1/namespaces/{name}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*abilities): what a server must be able to do (see kube_target.LACKS)")


def _is_lacking(item: pytest.Item) -> bool:
    call = getattr(item, "callspec", None)
    lacks = LACKS.get(call.params.get("target", ""), {}) if call is not None else {}
    return any(ability in lacks for mark in item.iter_markers("needs") for ability in mark.args)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a real server cannot show; accept that nobody vouches for the certificates of those in tests."""
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning"))
    left_out = [item for item in own if _is_lacking(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
