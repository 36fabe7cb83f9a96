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


@pytest.mark.parametrize(
    ("faults", "detect_s"),
    [
        # The others could not leave, which is noticed half a minute after the exception; that is no detection of it.
        ([FaultRecord(Cause.EXCEPTION, "a", 0, 72.0, 0.0), FaultRecord(Cause.HARD_TIMEOUT, "b", 0, 72.5, 30.0)], 0.0),
        # A hang counts from its last sign of life, whatever becomes of it later.
        ([FaultRecord(Cause.SOFT_TIMEOUT, "b", 0, 64.0, 8.0), FaultRecord(Cause.HARD_TIMEOUT, "b", 0, 72.0, 4.0)], 8.0),
        # A move begins once all ranks have saved the same step; they train until then.
        ([FaultRecord(Cause.POD_LEAVING, "a", None, 66.0, 0.0)], 0.0),
        # Others report the break of a connection first; that pod had been silent before.
        (
            [FaultRecord(Cause.EXCEPTION, "a", 0, 72.0, 0.0), FaultRecord(Cause.HEARTBEAT_LOST, "c", None, 67.0, 9.0)],
            5.0,
        ),
    ],
)
def test_detection_is_over_when_the_recovery_begins(faults: list[FaultRecord], detect_s: float) -> None:
    incident = Incident(1, 72.0, 0, 2)
    for fault in faults:
        incident.add(fault)
    incident.finish(103.0)
    assert incident.phase_s["detect"] == detect_s
