"""Checks of others: commands with node-problem-detector's contract."""

import json
from typing import Any

import pytest

from unbroken.watch.checks.check import Check, Judgement, not_checked
from unbroken.watch.checks.probe import Probe, judge_probe, make_checks, read_probes
from unbroken.watch.child import MAX_OUTPUT_BYTES, CommandResult
from unbroken.watch.lane import Lane
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.findings import Finding, Verdict

PROBE = Probe("scratch", ("true",))


@pytest.mark.parametrize(
    ("answer", "verdict", "message"),
    [
        pytest.param(CommandResult(0, "fine\n", 0.0), Verdict.OK, "fine", id="0"),
        pytest.param(CommandResult(1, "disk is gone\nmore", 0.0), Verdict.SUSPECT, "disk is gone", id="1"),
        pytest.param(CommandResult(2, "", 0.0), Verdict.UNKNOWN, "exit code 2: ", id="2"),
        pytest.param(
            CommandResult(77, "x" * 4096, 0.0), Verdict.UNKNOWN, f"exit code 77: {'x' * 200}", id="an odd end"
        ),
        pytest.param(
            CommandResult(1, "", 0.0, "trace\nE: no module\n"), Verdict.SUSPECT, "E: no module (standard error)", id="E"
        ),
        pytest.param(
            CommandResult(127, " \n", 0.0, "sh: x: not found"),
            Verdict.UNKNOWN,
            "exit code 127: sh: x: not found (standard error)",
            id="an end that the shell explains",
        ),
        pytest.param(CommandResult(1, "said", 0.0, "noise"), Verdict.SUSPECT, "said", id="words before noise"),
        pytest.param(CommandResult(0, "", 0.0, "a warning"), Verdict.OK, "", id="all is well in spite of noise"),
        pytest.param(CommandResult(-9, "", 0.0), Verdict.UNKNOWN, "exit code -9: ", id="a signal"),
        pytest.param(CommandResult(None, "", 0.0), Verdict.UNKNOWN, "it did not end in time: ", id="never"),
    ],
)
def test_the_exit_code_is_the_verdict(answer: CommandResult, verdict: Verdict, message: str) -> None:
    (finding,) = judge_probe(PROBE, None, answer).findings
    assert (finding.check, finding.verdict, finding.message, finding.seen) == ("scratch", verdict, message, 1)


def test_a_probe_that_fails_again_is_seen_again_and_its_last_failure_is_soon_forgotten() -> None:
    history: Any = None
    seen = []
    for code in (1, 1, 0, 0, 0):
        judgement = judge_probe(PROBE, history, CommandResult(code, "", 0.0))
        history = judgement.history
        seen.append((judgement.findings[0].verdict, judgement.findings[0].seen))
    suspect = Verdict.SUSPECT
    assert seen == [(suspect, 1), (suspect, 2), (suspect, 2), (suspect, 1), (Verdict.OK, 1)]


def test_what_failed_is_not_well_where_the_probe_knows_nothing_any_more() -> None:
    """Seen before: where a daemon had called the node broken and ended, or a command failed and then hung, nothing was
    wrong any more."""
    history: Any = None
    told = []
    for answer in (
        CommandResult(None, "", 0.0),
        CommandResult(1, "GPU 5 is lost", 0.0),
        CommandResult(2, "no daemon", 0.0),
        CommandResult(None, "", 0.0),
        CommandResult(-9, "", 0.0),
        CommandResult(127, "", 0.0),
        CommandResult(0, "fine", 0.0),
        CommandResult(0, "fine", 0.0),
        CommandResult(0, "fine", 0.0),
        CommandResult(2, "no daemon", 0.0),
    ):
        judgement = judge_probe(PROBE, history, answer)
        history = judgement.history
        told.append([(each.verdict, each.message, each.seen) for each in judgement.findings])
    lost = (Verdict.SUSPECT, "GPU 5 is lost; its last look knows nothing", 1)
    passed = [(Verdict.SUSPECT, "GPU 5 is lost; its last look passed", 1)]
    assert told == [
        [(Verdict.UNKNOWN, "it did not end in time: ", 1)],
        [(Verdict.SUSPECT, "GPU 5 is lost", 1)],
        [lost, (Verdict.UNKNOWN, "exit code 2: no daemon", 1)],
        [lost, (Verdict.UNKNOWN, "it did not end in time: ", 1)],
        [lost, (Verdict.UNKNOWN, "exit code -9: ", 1)],
        [lost, (Verdict.UNKNOWN, "exit code 127: ", 1)],
        passed,
        passed,
        [(Verdict.OK, "fine", 1)],
        [(Verdict.UNKNOWN, "exit code 2: no daemon", 1)],
    ]


def test_probes_run_and_what_they_print_is_bounded() -> None:
    probes = read_probes(
        json.dumps(
            [
                {"name": "flood", "command": ["sh", "-c", "yes | head -c 100000; exit 1"], "verdict": "fatal"},
                {"name": "absent", "command": ["/nonexistent"]},
                {"name": "secret", "command": ["sh", "-c", "echo $UNBROKEN_DIR; exit 0"]},
            ]
        )
    )
    flood, absent, secret = (check.judge(None, check.sample()).findings[0] for check in make_checks(probes))
    assert (flood.verdict, len(flood.message) <= MAX_OUTPUT_BYTES) == (Verdict.FATAL, True)
    assert (absent.verdict, absent.message) == (
        Verdict.UNKNOWN,
        "exit code 127: cannot be started: No such file or directory",
    )
    assert (secret.verdict, secret.message) == (Verdict.OK, "")


def test_why_a_probe_cannot_go_on_is_known_by_what_it_says_last_on_standard_error() -> None:
    probes = read_probes(
        json.dumps(
            [
                {"name": "module", "command": ["python3", "-m", "nowhere.at_all"], "timeoutSeconds": 60},
                {"name": "noise", "command": ["sh", "-c", "yes | head -c 300000 >&2; echo at last >&2; exit 3"]},
                {"name": "binary", "command": ["sh", "-c", "printf 'a\\377\\033[2J' >&2; exit 1"]},
            ]
        )
    )
    module, noise, binary = (check.judge(None, check.sample()).findings[0] for check in make_checks(probes))
    assert module.verdict is Verdict.SUSPECT
    assert "No module named" in module.message
    assert (noise.verdict, noise.message) == (Verdict.UNKNOWN, "exit code 3: at last (standard error)")
    assert binary.message == "a\ufffd\x1b[2J (standard error)"


@pytest.mark.parametrize("is_wanted", [True, False])
def test_why_a_check_that_somebody_wants_knows_nothing_is_in_the_log_once_while_it_lasts(
    is_wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    answers = [*[CommandResult(2, "no \x1b daemon", 0.0)] * 3, CommandResult(0, "", 0.0), CommandResult(2, "gone", 0.0)]

    def sample() -> CommandResult:
        return answers.pop(0)

    check = Check("daemon", 300.0, sample, lambda history, answer: judge_probe(PROBE, history, answer))
    lane = Lane([check], lambda _check, _findings: None, lambda: now_s, is_wanted=is_wanted)
    seen = []
    while answers:
        lane.step()
        seen.append([each.getMessage() for each in caplog.records])
        caplog.clear()
        now_s += 300.0
    first, last = ([f"nothing is known: check=daemon why=exit code 2: {why}"] for why in ("no \\x1b daemon", "gone"))
    assert seen == ([first, [], [], [], last] if is_wanted else [[]] * 5)


def test_a_check_that_knows_nothing_now_and_then_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0

    def judge(_history: object, at_s: float) -> Judgement:
        finding = Finding("fans", "", Verdict.OK) if at_s % 2 else not_checked("fans", "no driver")
        return Judgement((finding,), None)

    lane = Lane([Check("fans", 1.0, lambda: now_s, judge)], lambda _c, _f: None, lambda: now_s, is_wanted=True)
    for _ in range(1200):
        lane.step()
        now_s += 1.0
    assert [each.getMessage() for each in caplog.records] == ["nothing is known: check=fans why=no driver"] * 2


@pytest.mark.parametrize(
    ("item", "text"),
    [
        pytest.param({"name": "gpu", "command": ["x"]}, "[0].name", id="a built-in name"),
        pytest.param({"name": "Two Words", "command": ["x"]}, "[0].name", id="no name"),
        pytest.param({"name": "a", "command": []}, "[0].command", id="no command"),
        pytest.param({"name": "a", "command": "x"}, "[0].command", id="no list"),
        pytest.param({"name": "a", "command": ["x\0"]}, "[0].command", id="NUL"),
        pytest.param({"name": "a", "command": ["x"], "periodSeconds": 0}, "[0].periodSeconds", id="all the time"),
        pytest.param({"name": "a", "command": ["x"], "timeoutSeconds": 1e9}, "[0].timeoutSeconds", id="for ever"),
        pytest.param({"name": "a", "command": ["x"], "verdict": "ok"}, "[0].verdict", id="never bad"),
        pytest.param({"name": "a", "command": ["x"], "verdict": ["fatal"]}, "[0].verdict", id="a list of verdicts"),
        pytest.param({"name": "a", "command": ["x"], "verdict": {}}, "[0].verdict", id="an object as verdict"),
        pytest.param({"name": "a", "command": ["x"], "verdict": None}, "[0].verdict", id="no verdict"),
        pytest.param({"name": "a", "command": ["x", "\ud800"]}, "[0].command", id="no bytes"),
        pytest.param({"name": ["a"], "command": ["x"]}, "[0].name", id="a list of names"),
        pytest.param({"name": "a", "command": ["x"], "periodSeconds": [1]}, "[0].periodSeconds", id="a list of times"),
        pytest.param({"name": "a", "command": ["x"], "shell": True}, "[0]", id="unknown field"),
        pytest.param("a", "[0]", id="no object"),
    ],
)
def test_a_probe_that_cannot_be_is_refused_by_name(item: Any, text: str) -> None:
    with pytest.raises(InputError) as refused:
        read_probes(json.dumps([item]))
    assert str(refused.value).startswith(f"UNBROKEN_WATCH_PROBES{text}: want ")


@pytest.mark.parametrize("text", ["{", "{}", "[" * 100_000, json.dumps([{"name": "a", "command": ["x"]}] * 9)])
def test_what_is_no_list_of_probes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="UNBROKEN_WATCH_PROBES: want"):
        read_probes(text)


def test_the_same_name_twice_is_refused() -> None:
    with pytest.raises(InputError, match="each name once"):
        read_probes(json.dumps([{"name": "a", "command": ["x"]}] * 2))
