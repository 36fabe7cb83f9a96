"""What a pod's own checks mean for its job: broken only where that is sure, unknown where nothing was seen."""

import pytest

from unbroken.preflight.outcomes import CheckEnding, CheckOutcome, findings_of, untold
from unbroken.preflight.versions import KNOWN_BAD
from unbroken_core.vocabulary.findings import DEVICES, LOOPBACK, MATMUL, PREFLIGHT, VERSIONS, Finding, Verdict

FATAL, SUSPECT, UNKNOWN, OK = Verdict.FATAL, Verdict.SUSPECT, Verdict.UNKNOWN, Verdict.OK


@pytest.mark.parametrize(
    ("check", "entity", "ending", "message", "verdict"),
    [
        ("matmul", "cuda:3", CheckEnding.WRONG, "bfloat16: 12 of 16777216 products are wrong", FATAL),
        ("matmul", "cpu", CheckEnding.WRONG, "float32: 1 of 65536 products are wrong", FATAL),
        ("matmul", "cuda:3", CheckEnding.ERROR, "AcceleratorError: CUDA error: uncorrectable ECC error", FATAL),
        ("matmul", "cuda:3", CheckEnding.ERROR, "OutOfMemoryError: CUDA out of memory. Tried to allocate", UNKNOWN),
        ("matmul", "cpu", CheckEnding.ERROR, "RuntimeError: not enough", SUSPECT),
        ("matmul", "cuda:3", CheckEnding.SILENT, "no end within 40 s", UNKNOWN),
        ("matmul", "cuda:3", CheckEnding.KILLED, "its process was ended by SIGKILL", UNKNOWN),
        ("matmul", "cuda:3", CheckEnding.DEAD, "its process was ended by SIGSEGV", SUSPECT),
        ("devices", "", CheckEnding.WRONG, "want 8 GPUs, got 7", FATAL),
        ("devices", "", CheckEnding.MORE, "want 1 GPUs, got 8", OK),
        ("loopback", "", CheckEnding.WRONG, "rank 0: WrongDataError: all_reduce", FATAL),
        ("loopback", "", CheckEnding.ERROR, "rank 0: DistBackendError: NCCL error: unhandled system error", SUSPECT),
    ],
)
def test_an_outcome_is_broken_only_where_that_is_sure(
    check: str, entity: str, ending: CheckEnding, message: str, verdict: Verdict
) -> None:
    (finding,) = findings_of((CheckOutcome(check, entity, ending, message),), {})
    assert finding.verdict is verdict
    if verdict is not OK:
        assert (finding.check, finding.entity, finding.message) == (f"preflight-{check}", entity, message)


def test_all_that_is_well_of_a_check_is_one_finding() -> None:
    outcomes = [CheckOutcome("matmul", f"cuda:{number}", CheckEnding.WELL, "") for number in range(8)]
    assert findings_of(outcomes, {"torch": "2.9.1", "nccl": ""}) == (
        Finding(MATMUL, "", OK, message="8 tests passed"),
        Finding(VERSIONS, "", OK, message="torch 2.9.1"),
    )


@pytest.mark.parametrize("bad", KNOWN_BAD, ids=lambda bad: bad.pattern)
def test_a_version_that_is_known_to_be_bad_is_told_and_moves_nothing(bad: object) -> None:
    """All pods have the image's: no other one is better."""
    known = next(each for each in KNOWN_BAD if each is bad)
    (finding,) = findings_of((), {"torch": "2.9.1", known.name: known.pattern})
    assert (finding.check, finding.entity, finding.verdict) == (
        VERSIONS,
        f"{known.name} {known.pattern}",
        Verdict.DEGRADED,
    )
    assert known.why.startswith(finding.message)


def test_whatever_was_not_told_is_unknown() -> None:
    findings = untold((Finding(DEVICES, "", OK),), "why")
    assert [(each.check, each.verdict) for each in findings] == [
        (DEVICES, OK),
        (VERSIONS, UNKNOWN),
        (MATMUL, UNKNOWN),
        (LOOPBACK, UNKNOWN),
    ]
    assert {each.message for each in findings[1:]} == {"why"}
    assert {each.check for each in untold(())} == set(PREFLIGHT)


def test_long_words_of_a_library_are_cut() -> None:
    (finding,) = findings_of((CheckOutcome("matmul", "cuda:0", CheckEnding.ERROR, "x" * 10_000),), {})
    assert len(finding.message) == 300
