"""What kubectl shows under STATUS."""

from typing import Any

import pytest

from unbroken_local.apiserver.tables import pod_status


def ended(name: str, exit_code: int, reason: str) -> dict[str, Any]:
    """Return the status of a container that has ended."""
    return {"name": name, "started": False, "state": {"terminated": {"exitCode": exit_code, "reason": reason}}}


@pytest.mark.parametrize(
    ("trainer", "phase", "wanted"),
    [
        pytest.param(ended("trainer", 1, "Error"), "Failed", "Error", id="failed"),
        pytest.param(ended("trainer", 0, "Completed"), "Succeeded", "Completed", id="succeeded"),
    ],
)
def test_a_sidecar_that_ended_well_does_not_hide_how_the_pod_ended(
    trainer: dict[str, Any], phase: str, wanted: str
) -> None:
    pod = {
        "metadata": {"name": "digits-0"},
        "spec": {"initContainers": [{"name": "unbroken-agent", "restartPolicy": "Always"}]},
        "status": {
            "phase": phase,
            "initContainerStatuses": [ended("unbroken-agent", 0, "Completed")],
            "containerStatuses": [trainer],
        },
    }
    assert pod_status(pod) == wanted


@pytest.mark.parametrize(
    ("is_initialized", "wanted"),
    [
        pytest.param("True", "Completed", id="after the containers"),
        pytest.param("False", "Init:Error", id="before them"),
    ],
)
def test_a_sidecar_that_ended_badly_shows_only_while_the_pod_is_not_initialized(
    is_initialized: str, wanted: str
) -> None:
    pod = {
        "metadata": {"name": "digits-0"},
        "spec": {"initContainers": [{"name": "unbroken-agent", "restartPolicy": "Always"}]},
        "status": {
            "phase": "Succeeded",
            "conditions": [{"type": "Initialized", "status": is_initialized}],
            "initContainerStatuses": [ended("unbroken-agent", 143, "Error")],
            "containerStatuses": [ended("trainer", 0, "Completed")],
        },
    }
    assert pod_status(pod) == wanted
