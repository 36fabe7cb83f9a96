"""Which of the faults of one interruption names the culprit."""

from dataclasses import replace

import pytest

from unbroken_core.recovery.history import FaultRecord, Incident
from unbroken_core.vocabulary.reasons import Cause

WAITS = FaultRecord(Cause.SOFT_TIMEOUT, "waits", 0, at_s=10.0, detect_s=62.0)
"""Reported at 72; its last progress was at 10."""


@pytest.mark.parametrize(
    ("faults", "culprit"),
    [
        pytest.param(
            [replace(WAITS, pod_uid="younger", at_s=11.0, detect_s=61.0), WAITS],
            "waits",
            id="of two timeouts that are reported at once the older",
        ),
        pytest.param(
            [replace(WAITS, pod_uid="first", at_s=12.0, detect_s=60.0), replace(WAITS, detect_s=65.0)],
            "first",
            id="a timeout that is reported later is a consequence, however old it is",
        ),
        pytest.param(
            [WAITS, replace(WAITS, pod_uid="runs", at_s=73.0, detect_s=0.0, is_certain=True)],
            "runs",
            id="one that runs Python without a ping beats one that is blocked",
        ),
        pytest.param(
            [replace(WAITS, pod_uid="runs", is_certain=True), replace(WAITS, at_s=1.0, detect_s=71.0)],
            "runs",
            id="one that is blocked never beats it",
        ),
        pytest.param(
            [replace(WAITS, is_certain=True), replace(WAITS, pod_uid="dead", cause=Cause.PROCESS_SIGNAL, at_s=80.0)],
            "dead",
            id="a stronger cause beats any timeout",
        ),
        pytest.param(
            [
                FaultRecord(Cause.EXCEPTION, "late", 0, at_s=20.0),
                FaultRecord(Cause.EXCEPTION, "was away", 0, at_s=19.0, detect_s=3.0),
            ],
            "was away",
            id="of other causes the earliest",
        ),
    ],
)
def test_culprit(faults: list[FaultRecord], culprit: str) -> None:
    incident = Incident(1, 72.0, 0, 2)
    for fault in faults:
        incident.add(fault)
    assert incident.culprit.pod_uid == culprit
