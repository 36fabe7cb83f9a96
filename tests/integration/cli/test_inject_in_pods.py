"""`unbroken inject` for a job in a cluster: kubectl's exec is a program that runs what it is told here, as in a pod."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unbroken.faults.findings import read_findings
from unbroken_cli.commands import inject
from unbroken_core.pod.fault_orders import FaultOrder

KUBECTL = """#!/bin/sh
echo "$@" >> "$ASKED"
while [ "$1" != -- ]; do [ "$1" = exec ] && pod="$2"; shift; done
shift
export UNBROKEN_DIR="$PODS/$pod"
exec "$@"
"""


class Cluster:
    """One job with two pods, as its API server has them."""

    namespace = "ml"

    def job(self, namespace: str, name: str) -> dict[str, Any]:
        """Return the job."""
        metadata = {"name": name, "namespace": namespace}
        return {"metadata": metadata, "spec": {}, "status": {"state": "Running"}}

    def pods(self, _namespace: str, _job: str, _component: str) -> list[dict[str, Any]]:
        """Return the pods."""
        return [
            {
                "metadata": {"name": f"digits-{number}", "uid": str(number), "labels": {"unbroken.dev/role": "active"}},
                "spec": {"nodeName": "node-a", "containers": [{"name": "trainer", "command": [sys.executable]}]},
                "status": {"phase": "Running"},
            }
            for number in range(2)
        ]


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of the pods."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o700)
    for number in range(2):
        (tmp_path / f"digits-{number}").mkdir()
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ASKED": str(tmp_path / "asked"), "PODS": str(tmp_path)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(inject, "connect", lambda _arguments: Cluster())
    return tmp_path


def findings(pods: Path, pod: str) -> list[FaultOrder]:
    """Return what the watch of a pod is to find."""
    return [each.order for each in read_findings(pods / pod, time.monotonic())]


def test_all_pods_of_a_node_find_what_they_are_told_to_and_say_so(
    pods: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNBROKEN_ALLOW_FAULTS", "1")
    monkeypatch.setenv("UNBROKEN_WATCH", "1")
    command = ["digits", "-n", "ml", "--fault", "link-down", "--node", "node-a", "--seconds", "60"]
    assert inject.main(command) == 2
    told = "it would hit pod digits-0 on node node-a, pod digits-1 on node node-a with link-down"
    assert told in capsys.readouterr().err
    assert findings(pods, "digits-0") == []
    assert inject.main([*command, "--yes", "-o", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    said = "link-down: the watch finds it within seconds, for 60 s; nothing is broken"
    assert value["hits"] == [{"pod": f"digits-{n}", "node": "node-a", "said": said} for n in range(2)]
    assert [each.kind for pod in ("digits-0", "digits-1") for each in findings(pods, pod)] == ["link-down"] * 2
    asked = (pods / "asked").read_text().splitlines()
    assert asked[0].startswith("--namespace ml exec digits-0 --container trainer -- ")


def test_a_refusal_of_the_pod_is_what_is_shown_and_who_was_hit_before(
    pods: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["digits", "-n", "ml", "--fault", "exception", "--yes"]
    assert inject.main(command) == 1
    assert capsys.readouterr().err == (
        "unbroken inject: exception: this pod allows no faults; want UNBROKEN_ALLOW_FAULTS=1 in the env of "
        "spec.template's first container, or `unbroken run --allow-faults`\n"
    )
    monkeypatch.setenv("UNBROKEN_ALLOW_FAULTS", "1")
    monkeypatch.setenv("UNBROKEN_WATCH", "1")
    (pods / "digits-1").rmdir()
    assert inject.main(["digits", "-n", "ml", "--fault", "xid", "--node", "node-a", "--yes"]) == 1
    error = capsys.readouterr().err
    assert "xid: pod digits-0 on node node-a: xid: the watch finds it within seconds" in error
    assert "; then " in error
    assert "No such file or directory; nothing was done" in error


def test_a_pod_of_an_earlier_release_is_told_from_one_that_cannot_be_reached(
    pods: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (pods / "kubectl").write_text("#!/bin/sh\necho /usr/bin/python: No module named unbroken.faults >&2; exit 1\n")
    assert inject.main(["digits", "--fault", "exception", "--yes"]) == 1
    assert "this pod's release of Unbroken knows no such fault; nothing was done" in capsys.readouterr().err
