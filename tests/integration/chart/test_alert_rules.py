"""The alerts that the chart brings, tried out by Prometheus' own tool."""

import shutil
import subprocess
from pathlib import Path

import pytest

ALERTS = Path(__file__).parents[3] / "charts" / "unbroken" / "files" / "alerts.yaml"


@pytest.mark.parametrize(
    ("command", "file"),
    [
        pytest.param("check", ALERTS, id="check"),
        pytest.param("test", Path(__file__).with_name("alert_cases.yaml"), id="cases"),
    ],
)
def test_alerts_fire_where_they_should_and_nowhere_else(command: str, file: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool, of Prometheus, in PATH")
    done = subprocess.run(
        [promtool, command, "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
