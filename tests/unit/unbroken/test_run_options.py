"""Options and narration of `unbroken run`, and the packages that an init container copies."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unbroken.install import install
from unbroken.run.flags import in_flags
from unbroken.run.narration import LongWaits, Story, exit_code, narrate
from unbroken.run.options import read_options
from unbroken_core.protocol.log_rules.rules import LogRanks, LogRule, LogVerdict
from unbroken_core.protocol.messages import (
    PROTOCOL,
    HealthStatus,
    JobStatus,
    OtherFault,
    PodFinding,
    PodStatus,
    Recovery,
)
from unbroken_core.protocol.settings import DEFAULT_RUNGS, HealthMode, RungBudget
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.findings import LOG_LINES, Finding, Verdict
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Role, Rung


def test_what_is_found_wrong_is_told_once_while_it_lasts_and_in_bounds() -> None:
    def seen(*entities: str) -> JobStatus:
        text = "rank 1: a line matches: retrying"
        slow = [Finding(LOG_LINES, each, Verdict.DEGRADED, message=text) for each in entities]
        slow.append(Finding("memory", "", Verdict.DEGRADED))
        found = tuple(PodFinding("j-1", "n", each) for each in slow)
        return replace(STATUS, health=HealthStatus(1, found, len(found)))

    said = "found in j-1: log rule storage: rank 1: a line matches: retrying"
    assert narrate(STATUS, seen("storage")) == [said]
    assert narrate(seen("storage"), seen("storage")) == []
    assert narrate(seen("storage"), seen("loss", "storage")) == [said.replace("storage", "loss")]
    assert narrate(seen("storage"), STATUS) == []
    many = narrate(STATUS, seen(*(f"r{number}" for number in range(64))))
    assert (len(many), many[-1]) == (6, "and 59 more findings")


def with_health(found: dict[str, Verdict], held: str = "", **fields: Any) -> JobStatus:
    """Return a status of two pods that are there, with a broken GPU in each of these."""
    there = tuple(PodStatus(pod, pod, "n", Role.ACTIVE, (), (), (), is_connected=True) for pod in ("j-0", "j-1"))
    findings = tuple(PodFinding(pod, "n", Finding("gpu-events", "GPU-a", how, "xid-79")) for pod, how in found.items())
    return replace(STATUS, pods=there, health=HealthStatus(2, findings, len(findings), held=held), **fields)


HELD = "findings speak against 2 pods within 5 min, which may be a false alarm: no ranks move for it"


def test_that_nothing_moves_for_what_was_found_is_told_from_its_beginning_to_its_end() -> None:
    calm, one = with_health({}), with_health({"j-0": Verdict.FATAL})
    two = with_health({"j-0": Verdict.FATAL, "j-1": Verdict.FATAL}, HELD)
    assert narrate(one, two) == ["found in j-1: xid-79 on GPU-a is fatal", f"health: {HELD}"]
    more = with_health({"j-0": Verdict.FATAL, "j-1": Verdict.FATAL}, HELD.replace("2 pods", "30 pods"))
    assert narrate(two, two) == narrate(two, more) == [], "a line for each pod of a false alarm would be too many"
    over = "health: nothing holds back what was found any more"
    assert narrate(two, one) == ["no longer found in j-1: xid-79 on GPU-a is fatal", over]
    assert narrate(one, calm) == ["no longer found in j-0: xid-79 on GPU-a is fatal"]
    assert narrate(two, replace(calm, phase=JobPhase.COMPLETE, message="all"))[-1] == "complete: all"


def test_what_left_with_its_pod_or_is_only_not_shown_is_not_told_as_gone() -> None:
    one = with_health({"j-0": Verdict.FATAL, "j-9": Verdict.FATAL})
    crowded = with_health({"j-0": Verdict.FATAL})
    assert crowded.health is not None
    assert narrate(one, crowded) == [], "j-9 is no pod of the job any more"
    cut = replace(crowded, health=replace(crowded.health, findings=(), num_findings=70))
    assert narrate(crowded, cut) == []
    many = with_health({})
    entities = [Finding("gpu-events", f"GPU-{number}", Verdict.FATAL) for number in range(9)]
    before = replace(many, health=HealthStatus(2, tuple(PodFinding("j-0", "n", each) for each in entities), 9))
    assert narrate(before, many)[-1] == "and 4 more findings no longer"


def test_a_check_that_finds_something_else_with_each_look_fills_no_terminal() -> None:
    def seen(number: int) -> JobStatus:
        found = tuple(PodFinding("j-0", "n", Finding("fans", f"{number}-{n}", Verdict.SUSPECT)) for n in range(60))
        return replace(with_health({}), health=HealthStatus(2, found, len(found)))

    story, lines = Story(is_quiet=False), []
    for number in range(600):
        lines += story.tell(seen(number), number * 0.05)
    assert (lines[0], len(lines)) == ("training: iteration 0, 8 ranks, 2 spare", 61)
    assert lines[-1] == "more is found, or comes and goes, than is told here: see `unbroken status`"
    lines = story.tell(with_health({"j-1": Verdict.FATAL}), 61.0)
    assert "found in j-1: xid-79 on GPU-a is fatal" in lines


def test_script_becomes_a_job_of_its_name() -> None:
    """1.3"""
    options = read_options(["--pods", "4", "--spares", "1", "--ranks-per-pod", "2", __file__, "--epochs", "3"])
    settings = options.settings
    assert (settings.job, settings.replicas, settings.spares, settings.ranks_per_pod) == ("test-run-options", 4, 1, 2)
    assert options.command[1:] == (__file__, "--epochs", "3")
    assert (settings.rungs, settings.layers, options.domains) == (DEFAULT_RUNGS, (), ((),) * 5)


def test_only_who_asks_for_it_has_a_limit_of_faults_without_progress() -> None:
    assert read_options(["true"]).settings.no_progress_limit is None
    assert read_options(["--no-progress-limit", "3", "true"]).settings.no_progress_limit == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "at most 3 are allowed (restart.noProgressLimit); the last: exception of rank 0",
            "at most 3 are allowed (--no-progress-limit); the last: exception of rank 0",
        ),
        ("minReplicas: want 1 to replicas (2), got 3", "--min-pods: want 1 to --pods (2), got 3"),
        (
            "timeouts.softSeconds: want less than timeouts.hardSeconds (1.0), got 2.0",
            "--soft-timeout: want less than --hard-timeout (1.0), got 2.0",
        ),
        ("did not follow for 120 s (timeouts.barrierSeconds)", "did not follow for 120 s (--barrier-timeout)"),
        (
            "AttributeError: module model.replicas in replicas.py",
            "AttributeError: module model.replicas in replicas.py",
        ),
        ("replicas: want 1 to 4096, got 0", "--pods: want 1 to 4096, got 0"),
        (
            "want at most (replicas + spares.count) x ranksPerPod (6)",
            "want at most (--pods + --spares) x --ranks-per-pod (6)",
        ),
        ("got replicas x ranksPerPod = 4", "got --pods x --ranks-per-pod = 4"),
        *(
            (words, words)
            for words in (
                "exited with code 1: TypeError: __init__() got an unexpected keyword argument 'replicas'",
                "exception of rank 1 (RuntimeError: replicas differ in 3 values)",
                "exception of rank 1 (ValueError: want replicas, got none)",
                'KeyError: "minReplicas"',
            )
        ),
    ],
)
def test_messages_name_options_that_the_reader_can_type(text: str, told: str) -> None:
    assert in_flags(text) == told


def test_options_of_torchrun_are_understood() -> None:
    options = read_options(["--pods", "2", "--nproc-per-node", "4", "-m", "my.train", "--pods", "9", "-m", "x"])
    assert (options.settings.replicas, options.settings.ranks_per_pod, options.settings.job) == (2, 4, "my-train")
    assert options.command == (sys.executable, "-m", "my.train", "--pods", "9", "-m", "x")


def test_rungs_have_limits_and_windows() -> None:
    rungs = read_options(["--rungs", "process:3/60,pod:1,world", "true"]).settings.rungs
    assert rungs == (RungBudget(Rung.PROCESS, 3, 60.0), RungBudget(Rung.POD, 1), RungBudget(Rung.WORLD))


def test_each_pod_is_a_domain_of_its_own_unless_told() -> None:
    options = read_options(["--pods", "2", "--layers", "rack,host", "true"])
    assert options.domains == (("rack-0", "host-0"), ("rack-0", "host-1"))
    options = read_options(["--pods", "2", "--layers", "rack,host", "--domains", "r1/a,r2/b", "true"])
    assert options.domains == (("r1", "a"), ("r2", "b"))


def test_hard_and_barrier_timeout_follow_the_soft_one() -> None:
    timeouts = read_options(["--soft-timeout", "100", "true"]).settings.timeouts
    assert (timeouts.soft_s, timeouts.hard_s, timeouts.barrier_s) == (100.0, 150.0, 300.0)


HELP = "; `unbroken run --help` lists all options"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "script: want `unbroken run [options] script.py [arguments]`, got no script"),
        (["no-such.py"], "script: 'no-such.py' does not exist"),
        (["no-such-command"], "script: want a .py file or a command that is in PATH, got 'no-such-command'"),
        (["--podz", "2", "true"], f"unrecognized arguments: --podz{HELP}"),
        (["--pods", "x", "true"], f"argument --pods: invalid int value: 'x'{HELP}"),
        (["--pods", "300", "true"], "--pods, --spares: want at most 250 pods on one machine, got 300"),
        (["--pods", "2", "--min-pods", "3", "true"], "minReplicas: want 1 to replicas (2), got 3"),
        (["--layers", "a,,b", "true"], "--layers: want names with commas between them, got 'a,,b'"),
        (["--domains", "a", "true"], "--domains: want --layers with the names of the layers, got only --domains a"),
        (["--layers", "a", "--domains", "x/y", "true"], "--domains: want A for each pod, got 'x/y'"),
        (["--memory-replicas", "1", "true"], "--memory-replicas: want --memory SIZE as well, got no size"),
        (["--pods", "9", "--memory", "1Gi", "--memory-replicas", "4", "true"], "memory.replicas: want 0 to 3, got 4"),
        (
            ["--pods", "2", "--spares", "1", "--memory", "1Gi", "--memory-replicas", "3", "true"],
            "--memory-replicas: want at most 2, the other pods, got 3",
        ),
        (["--memory", "1Gi", "--memory-replicas", "-1", "true"], "memory.replicas: want 0 to 3, got -1"),
        (
            ["--memory", "1Gi", "--memory-across", "host", "true"],
            "--memory-across: want --memory-replicas N as well, got no copies",
        ),
        (
            ["--pods", "2", "--memory", "1Gi", "--memory-replicas", "1", "--memory-across", "rack", "true"],
            "memory.across: want 'host' or the name of a layer of topology.layers, [], got 'rack'",
        ),
        (["--job", "Digits", "true"], "--job: want lower-case letters, digits and dashes, at most 52, got 'Digits'"),
    ],
)
def test_bad_option_says_what_was_seen_and_wanted(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_options(arguments)
    assert str(caught.value) == message


def test_copies_are_a_setting_of_the_job() -> None:
    options = read_options(
        [
            *("--pods", "3", "--memory", "1Gi", "--memory-replicas", "2"),
            *("--layers", "rack", "--memory-across", "rack", "true"),
        ]
    )
    assert (options.settings.copies, options.settings.across) == (2, "rack")
    assert in_flags("memory.across: want 'host'") == "--memory-across: want 'host'"


def test_encryption_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read_options(["true"]).is_encrypted
    assert read_options(["--tls", "true"]).is_encrypted
    monkeypatch.setitem(sys.modules, "trustme", None)
    assert not read_options(["true"]).is_encrypted
    with pytest.raises(InputError) as caught:
        read_options(["--tls", "true"])
    assert str(caught.value) == "--tls needs the package trustme: pip install 'unbroken[tls]'"


STATUS = JobStatus(PROTOCOL, "j", 1, 1, JobPhase.RUNNING, Reason.TRAINING, "", 0, 8, 2, 0, (), {}, {}, (), -1, None)
RECOVERY = Recovery(
    1, Cause.PROCESS_SIGNAL, Rung.POD, 3, "j-1", "n", "", "killed", 0, 1, ("j-4",), {"stop": 0.02, "plan": 1.5}, "x", ""
)


def test_recovery_is_told_from_fault_to_end() -> None:
    broken = replace(STATUS, phase=JobPhase.INTERRUPTED, recoveries=(RECOVERY,))
    healed = replace(STATUS, iteration=1, recoveries=(replace(RECOVERY, ended_at="y"),))
    assert narrate(None, STATUS) == ["training: iteration 0, 8 ranks, 2 spare"]
    assert narrate(STATUS, STATUS) == []
    assert narrate(STATUS, broken) == ["fault 1: process-signal of rank 3 in j-1: killed"]
    assert narrate(broken, healed) == [
        "recovered 1: rung pod, j-4 took over in 1.5 s (stop 20 ms, plan 1.5 s)",
        "training: iteration 1, 8 ranks, 2 spare",
    ]


def test_a_quiet_run_tells_faults_recoveries_and_the_end_after_them() -> None:
    forming = replace(STATUS, phase=JobPhase.FORMING, message="waits for pods")
    broken = replace(STATUS, phase=JobPhase.INTERRUPTED, recoveries=(RECOVERY,))
    healed = replace(STATUS, iteration=1, recoveries=(replace(RECOVERY, ended_at="y"),))
    complete = replace(healed, phase=JobPhase.COMPLETE, message="all 8 ranks completed")
    # Of another rendezvous, which knows of no recovery.
    later = replace(complete, term=2, recoveries=())
    story = Story(is_quiet=True)
    told = [story.tell(status, 100.0 * number) for number, status in enumerate((forming, forming, STATUS, broken))]
    assert told == [[], [], [], ["fault 1: process-signal of rank 3 in j-1: killed"]]
    assert story.tell(healed, 500.0) == ["recovered 1: rung pod, j-4 took over in 1.5 s (stop 20 ms, plan 1.5 s)"]
    assert story.tell(later, 600.0) == ["complete: all 8 ranks completed"]

    clean = Story(is_quiet=True)
    assert clean.tell(STATUS, 0.0) + clean.tell(replace(complete, recoveries=()), 1.0) == []
    failed = Story(is_quiet=True)
    assert failed.tell(replace(STATUS, phase=JobPhase.FAILED, message="no rung"), 0.0) == ["failed: no rung"]
    loud = Story(is_quiet=False)
    assert loud.tell(STATUS, 0.0) == ["training: iteration 0, 8 ranks, 2 spare"]
    assert loud.tell(forming, 1.0) == []
    assert loud.tell(forming, 3.0) == ["forming: waits for pods"]


def test_culprit_of_a_recovery_is_told_again_when_it_is_another_one() -> None:
    first = replace(RECOVERY, rank=0, pod="j-0", cause=Cause.PROCESS_EXIT, detail="connection closed by peer")
    shown = replace(STATUS, phase=JobPhase.INTERRUPTED, recoveries=(first,))
    known = replace(shown, recoveries=(replace(RECOVERY, num_faults=2),))
    more = replace(shown, recoveries=(replace(RECOVERY, num_faults=3),))
    assert narrate(shown, known) == ["fault 1: process-signal of rank 3 in j-1: killed (and 1 more fault)"]
    assert narrate(known, more) == []


def test_other_faults_of_a_recovery_are_told_by_name_once() -> None:
    hung = OtherFault(Cause.HARD_TIMEOUT, 5, "j-2", "did not leave for 10 s")
    first = replace(RECOVERY, cause=Cause.EXCEPTION, detail="boom")
    alone = replace(STATUS, phase=JobPhase.INTERRUPTED, recoveries=(first,))
    raised = OtherFault(Cause.EXCEPTION, 3, "j-1", "boom")
    exited = replace(RECOVERY, cause=Cause.PROCESS_EXIT, rank=4, pod="j-9", detail="exit 7")
    two = replace(alone, recoveries=(replace(exited, num_faults=2, others=(raised,)),))
    assert narrate(alone, two) == ["fault 1: process-exit of rank 4 in j-9: exit 7"], "the other one was told"
    three = replace(alone, recoveries=(replace(exited, num_faults=4, others=(hung, raised)),))
    assert narrate(two, three) == ["fault 1, and rank 5 of j-2: hard-timeout (did not leave for 10 s)"]
    assert narrate(three, three) == []
    taken = replace(hung, taken_by="j-4")
    over = replace(exited, num_faults=4, others=(taken, raised), ended_at="y", taken_by="")
    assert narrate(three, replace(STATUS, iteration=1, recoveries=(over,)))[0] == (
        "recovered 1: rung pod, j-4 took over from j-2 in 1.5 s (stop 20 ms, plan 1.5 s)"
    )
    assert narrate(None, replace(STATUS, recoveries=(over,)))[:3] == [
        "fault 1: process-exit of rank 4 in j-9: exit 7 (and 1 more fault)",
        "fault 1, and rank 5 of j-2: hard-timeout (did not leave for 10 s)",
        "fault 1, and rank 3 of j-1: exception (boom)",
    ]


def test_installed_packages_are_whole_and_importable_and_replace_older_ones(tmp_path: Path) -> None:
    install(tmp_path)
    stale = tmp_path / "unbroken" / "stale.py"
    stale.touch()
    install(tmp_path)
    assert not stale.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["unbroken", "unbroken_core"]
    source = Path(install.__code__.co_filename).parents[1]
    names = {path.relative_to(source) for path in source.rglob("*.py")}
    assert {path.relative_to(tmp_path / "unbroken") for path in (tmp_path / "unbroken").rglob("*.py")} == names


def test_install_into_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(InputError, match=r"file cannot be written: "):
        install(path)


def test_a_wait_is_said_when_it_lasts_and_then_every_ten_seconds_with_how_long() -> None:
    waits = LongWaits()
    first = replace(STATUS, phase=JobPhase.FORMING, message="0 of 2 pods are ready")
    second = replace(STATUS, phase=JobPhase.FORMING, message="1 of 2 pods are ready")
    running = replace(STATUS, phase=JobPhase.RUNNING, message="the job is running")
    assert [waits.tell(first, at_s) for at_s in (0.0, 0.9)] == [None, None]
    assert waits.due_s(0.9) == pytest.approx(0.1)
    assert [waits.tell(second, at_s) for at_s in (0.95, 1.9)] == [None, None], "the first was over before it was read"
    assert waits.tell(second, 2.0) == "forming: 1 of 2 pods are ready"
    assert [waits.tell(second, at_s) for at_s in (2.1, 11.9)] == [None, None]
    assert waits.tell(second, 12.0) == "forming: 1 of 2 pods are ready (for 12 s)"
    assert waits.tell(second, 22.0) == "forming: 1 of 2 pods are ready (for 22 s)"
    assert waits.tell(running, 22.5) is None
    assert waits.due_s(22.5) == 30.0
    stuck = replace(STATUS, phase=JobPhase.INTERRUPTED, message="waits for p1")
    assert [waits.tell(stuck, at_s) for at_s in (30.0, 31.0)] == [None, "waits for p1"], "a new wait, from its start"


def test_a_script_on_standard_input_keeps_its_arguments() -> None:
    options = read_options(["--pods", "2", "-", "--epochs", "3"])
    assert (options.command, options.settings.job) == ((sys.executable, "-", "--epochs", "3"), "job")


@pytest.mark.parametrize(
    ("detail", "code"),
    [
        ("SystemExit: 3", 3),
        ("SystemExit: -1", 255),
        ("SystemExit: 256", 1),
        ("SystemExit: no data", 1),
        ("SystemExit: 9999999999999", 1),
        ("KeyboardInterrupt", 1),
    ],
)
def test_a_run_that_fails_by_sys_exit_ends_with_its_code(detail: str, code: int) -> None:
    last = replace(RECOVERY, cause=Cause.BASE_EXCEPTION, detail=detail, ended_at="")
    assert exit_code(replace(STATUS, recoveries=(last,))) == code
    assert exit_code(replace(STATUS, recoveries=(replace(last, ended_at="t"),))) == 1
    assert exit_code(replace(STATUS, recoveries=(replace(last, cause=Cause.EXCEPTION),))) == 1
    assert exit_code(STATUS) == 1


RULES: list[dict[str, Any]] = [
    {"name": "loss", "pattern": "loss=", "verdict": "hang", "recurringSeconds": 60, "ranks": "Every"},
    {"name": "end", "pattern": "^corrupt", "verdict": "fatal-stop"},
]


def test_log_rules_are_those_of_a_spec_in_a_file_or_in_place(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(RULES))
    wanted = (
        LogRule("loss", "loss=", LogVerdict.HANG, every_s=60.0, ranks=LogRanks.EVERY),
        LogRule("end", "^corrupt", LogVerdict.FATAL_STOP),
    )
    for given in (str(file), json.dumps(RULES)):
        assert read_options(["--log-rules", given, "true"]).settings.log_rules == wanted
    assert read_options(["true"]).settings.log_rules == ()


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("/nowhere/rules.json", "--log-rules: want a list in JSON, or a file with one, got '/nowhere/rules.json'"),
        ("", "--log-rules: want a list in JSON, or a file with one, got ''; want \\[\\] for no rules"),
        ('[{"name": "a", "ranks": "First", "name": "b"}]', "--log-rules: the key 'name' is in one object twice"),
        ("[", "--log-rules: want JSON, got '\\['"),
        ("[" * 50_000, "--log-rules: want JSON, got"),
        ("[" + " " * 70_000 + "]", "--log-rules: want at most 65536 bytes, got 70002"),
        (json.dumps(RULES * 9), "--log-rules: want a list of at most 16 rules"),
        ("[7]", "--log-rules\\[0\\]: want an object, got '7'"),
        ('[{"name": 1}]', "--log-rules\\[0\\].name: want a text, got '1'"),
        (json.dumps([{**RULES[1], "x": 1}]), "--log-rules\\[0\\].x: unknown field; want only"),
        (json.dumps([{**RULES[1], "verdict": "bad"}]), "--log-rules\\[0\\].verdict: want one of .*, got 'bad'"),
        (json.dumps([{**RULES[1], "ranks": []}]), "--log-rules\\[0\\].ranks: want one of .*, got"),
        (json.dumps([{**RULES[0], "recurringSeconds": True}]), "--log-rules\\[0\\].recurringSeconds: want seconds"),
        (json.dumps([{**RULES[0], "recurringSeconds": 0}]), "health.logRules\\[0\\].recurringSeconds: want 1 to"),
        (json.dumps([{**RULES[0], "recurringSeconds": 10**400}]), "--log-rules.*: want seconds, got 401 digits"),
        (json.dumps([{**RULES[1], "pattern": "\ud800"}]), "health.logRules\\[0\\].pattern: want characters of UTF-8"),
        (json.dumps([{**RULES[1], "pattern": "(a"}]), "health.logRules\\[0\\].pattern: want a \\) for this"),
    ],
)
def test_log_rules_that_cannot_be_are_refused_with_where_and_what(rules: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_options(["--log-rules", rules, "true"])


PROBES = [{"name": "scratch", "command": ["sh", "-c", "test -w /scratch || exit 1  # \u00fc"], "periodSeconds": 60}]


def test_probes_are_those_of_a_spec_in_a_file_or_in_place(tmp_path: Path) -> None:
    file = tmp_path / "probes.json"
    file.write_text(json.dumps(PROBES))
    for given in (str(file), json.dumps(PROBES)):
        probes = read_options(["--health", "Observe", "--probes", given, "true"]).probes
        assert json.loads(probes) == PROBES
        assert len(probes.encode()) < len(json.dumps(PROBES)), "a variable has an end"
    assert read_options(["true"]).probes == read_options(["--health", "Act", "--probes", "[]", "true"]).probes == ""


@pytest.mark.parametrize(
    ("mode", "probes", "said"),
    [
        ("Off", json.dumps(PROBES), "--probes: nothing runs them with --health Off; want --health Observe or Act"),
        ("Act", "/nowhere/probes.json", "--probes: want a list in JSON, or a file with one, got '/nowhere/probes.json"),
        ("Act", "", "--probes: want a list in JSON, or a file with one, got ''; want \\[\\] for no probes"),
        ("Act", json.dumps(PROBES * 9), "--probes: want a list of at most 8 probes, got"),
        ("Act", json.dumps(PROBES * 2), "--probes: want each name once, got \\['scratch', 'scratch'\\]"),
        ("Act", '[{"name": "a", "name": "b"}]', "--probes: the key 'name' is in one object twice"),
        ("Act", '[{"name": "gpu", "command": ["x"]}]', "--probes\\[0\\].name: want small letters"),
        ("Act", '[{"name": "a", "command": ["x"], "verdict": ["fatal"]}]', "--probes\\[0\\].verdict: want one of"),
    ],
)
def test_probes_that_cannot_be_are_refused_with_where_and_what(mode: str, probes: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_options(["--health", mode, "--probes", probes, "true"])


def test_a_preflight_is_a_setting_of_the_job() -> None:
    assert read_options(["true"]).settings.preflight is HealthMode.OFF
    settings = read_options(["--preflight", "Act", "--preflight-timeout", "30", "true"]).settings
    assert (settings.preflight, settings.preflight_s) == (HealthMode.ACT, 30.0)
    with pytest.raises(InputError) as caught:
        read_options(["--preflight", "Act", "--startup-timeout", "60", "true"])
    assert in_flags(str(caught.value)) == (
        "--preflight-timeout: want less than --startup-timeout (60), in which a pod gets ready, got 120"
    )


def test_tests_of_pairs_are_a_setting_of_the_job_and_need_a_preflight() -> None:
    assert not read_options(["--preflight", "Act", "true"]).settings.preflight_pairs
    assert read_options(["--preflight", "Act", "--preflight-pairs", "true"]).settings.preflight_pairs
    with pytest.raises(InputError) as refused:
        read_options(["--preflight-pairs", "true"])
    assert (
        in_flags(str(refused.value)) == "--preflight-pairs: want --preflight Observe or Act for tests of pairs, got Off"
    )
