"""`spec.health`: what pods look at, what the status says of findings, and the end of a pod with a broken device."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.unbroken_core.coordinator.health.test_health import WatchedBench
from tests.unit.unbroken_core.coordinator.test_coordinator import SETTINGS
from tests.unit.unbroken_operator.operator_world import World, a_job, a_node, a_recovery, running_world

from unbroken.watch.checks.probe import BUILT_IN as BUILT_IN_OF_WATCH
from unbroken.watch.checks.probe import Probe, read_probes
from unbroken_core.protocol.log_rules.rules import LogRanks, LogRule, LogVerdict
from unbroken_core.protocol.messages import HealthStatus, PodFinding
from unbroken_core.protocol.settings import HealthMode
from unbroken_core.protocol.wire import decode, encode, settings_from_json, settings_to_json
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.findings import LOG_LINES, NOT_TOLD, STRAGGLERS, Finding, Health, Verdict
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Role
from unbroken_operator.api.health_models import BUILT_IN
from unbroken_operator.decisions.admission import InvalidSpec, ValidSpec, admit
from unbroken_operator.decisions.limits.report import read_report, report_limits
from unbroken_operator.decisions.objects.training_pods import template_digest, training_pod
from unbroken_operator.decisions.snapshot import OperatorOptions

LOST = Finding("gpu-events", "GPU-a", Verdict.FATAL, "xid-79", message="XID 79: the GPU has fallen off the bus")
SLOW = Finding("gpu", "GPU-b", Verdict.DEGRADED, "throttled", message="the hardware slows it down")
WHY = "xid-79 on GPU-a is fatal: XID 79: the GPU has fallen off the bus"


def valid(**spec: Any) -> ValidSpec:
    verdict = admit(a_job(**spec))
    assert isinstance(verdict, ValidSpec), verdict
    return verdict


def watch_variables(verdict: ValidSpec) -> dict[str, str]:
    pod = training_pod(verdict.spec, verdict.settings, 7, Role.ACTIVE, OperatorOptions("sidecar:1"))["spec"]
    variables = pod["containers"][0]["env"]
    return {one["name"]: one["value"] for one in variables if one["name"].startswith("UNBROKEN_WATCH")}


def test_a_job_that_says_nothing_is_observed_and_one_that_says_off_is_not() -> None:
    plain = valid()
    assert (plain.settings.health, watch_variables(plain)) == (HealthMode.OBSERVE, {"UNBROKEN_WATCH": "1"})
    off = valid(health={"mode": "Off"})
    assert (off.settings.health, watch_variables(off)) == (HealthMode.OFF, {})
    paths = valid(health={"mode": "Act", "storage": ["/data", "/scratch"]})
    assert watch_variables(paths) == {"UNBROKEN_WATCH": "1", "UNBROKEN_WATCH_STORAGE": "/data:/scratch"}


def test_the_watch_reads_the_probes_that_a_job_asks_for() -> None:
    probe = {"name": "scratch", "command": ["sh", "-c", "test -e $(FILE)"], "verdict": "fatal"}
    (text,) = (
        value
        for name, value in watch_variables(valid(health={"probes": [probe]})).items()
        if name == "UNBROKEN_WATCH_PROBES"
    )
    assert read_probes(text.replace("$$(", "$(")) == (
        Probe("scratch", ("sh", "-c", "test -e $(FILE)"), 30.0, 5.0, Verdict.FATAL),
    )
    assert frozenset(BUILT_IN) == BUILT_IN_OF_WATCH


def test_images_and_pods_of_an_earlier_release_see_no_change_in_a_job_that_says_nothing() -> None:
    assert "health" not in settings_to_json(valid().settings)
    digests = {mode: template_digest(valid(health={"mode": mode}).spec) for mode in ("Off", "Observe", "Act")}
    assert digests["Observe"] == digests["Act"] == template_digest(valid().spec)
    assert digests["Off"] != digests["Act"]


@pytest.mark.parametrize(
    ("health", "text"),
    [
        pytest.param({"mode": "Perhaps"}, "spec.health.mode", id="another mode"),
        pytest.param({"storage": ["data"]}, "spec.health.storage[0]", id="no absolute path"),
        pytest.param({"storage": ["/a:/b"]}, "spec.health.storage[0]", id="two paths in one"),
        pytest.param({"storage": [f"/{n}" for n in range(9)]}, "spec.health.storage", id="too many"),
        pytest.param({"storage": ["/" + "x" * 120]}, "spec.health.storage[0]", id="too long"),
        pytest.param({"probes": [{"name": "gpu", "command": ["x"]}]}, "spec.health.probes[0]", id="a built-in name"),
        pytest.param({"probes": [{"name": "a", "command": []}]}, "spec.health.probes[0].command", id="no command"),
        pytest.param({"probes": [{"name": "a", "command": ["x"]}] * 2}, "spec.health.probes", id="a name twice"),
        pytest.param({"checks": []}, "spec.health.checks", id="unknown field"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_by_name(health: dict[str, Any], text: str) -> None:
    verdict = admit(a_job(health=health))
    assert isinstance(verdict, InvalidSpec)
    assert text in verdict.message


def probes_of(num_bytes: int, character: str) -> list[dict[str, Any]]:
    """Return eight probes whose commands have so many bytes together."""
    num = num_bytes // len(character.encode()) // 32
    return [{"name": f"p{index}", "command": [character * num] * 4} for index in range(8)]


@pytest.mark.parametrize("character", ["x", "\x01", '"', "é", "\u2028", "😀", "$("], ids=ascii)
def test_the_longest_commands_fit_in_a_variable_with_which_processes_start(character: str) -> None:
    """Seen before: eight probes of 16 KiB each were admitted, and then exec failed with E2BIG in every new pod."""
    (found,) = [
        value
        for name, value in watch_variables(valid(health={"probes": probes_of(16 << 10, character)})).items()
        if name == "UNBROKEN_WATCH_PROBES"
    ]
    assert len(f"UNBROKEN_WATCH_PROBES={found}".encode()) < 128 << 10
    verdict = admit(a_job(health={"probes": probes_of((16 << 10) + 512, character)}))
    assert isinstance(verdict, InvalidSpec)
    assert "spec.health.probes: want at most 16384 bytes in the commands of all probes, got 1" in verdict.message


def health_of(*findings: Finding, held: str = "", unchecked: tuple[tuple[str, int], ...] = ()) -> HealthStatus:
    found = tuple(PodFinding("digits-0", "a", finding) for finding in findings)
    return HealthStatus(3, found, len(found), unchecked, held)


def say(world: World, health: HealthStatus | None, **fields: Any) -> str:
    """Let the rendezvous report; return what the condition says then."""
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], health=health, **fields)
    world.settle()
    found = [item for item in world.job["status"]["conditions"] if item["type"] == "NodesHealthy"]
    return str(found[0]["message"]) if found else ""


def test_the_condition_says_what_is_broken_and_what_was_not_checked() -> None:
    world = running_world()
    assert say(world, None) == ""
    assert say(world, health_of(SLOW, unchecked=(("ports", 2), ("storage", 3)))) == (
        "nothing broken was found; worn: digits-0 on node a: throttled on GPU-b is degraded: the hardware slows it "
        "down; not checked everywhere: ports, storage"
    )
    assert world.condition("NodesHealthy") == ("True", "NodesHealthy")
    message = say(world, health_of(LOST, held="may be a false alarm", unchecked=(("ports", 3),)))
    assert message == f"digits-0 on node a: {WHY}; may be a false alarm; not checked everywhere: ports"
    assert world.condition("NodesHealthy") == ("False", "DevicesFaulty")
    assert world.messages("DevicesFaulty") == [message]
    say(world, None)
    assert world.condition("NodesHealthy") == ("Unknown", "HealthNotChecked")


def test_stragglers_have_a_condition_of_their_own_and_an_event() -> None:
    world = running_world()
    slow = Finding(STRAGGLERS, "rank 1", Verdict.SUSPECT, "slow-rank", message="busy for long", seen=2)
    say(world, None)
    assert "Straggling" not in {item["type"] for item in world.job["status"]["conditions"]}
    assert say(world, replace(health_of(), num_pods=0, num_paced=6)) == "", "no watch has said anything"
    assert world.condition("Straggling") == ("False", "PaceEven")
    assert say(world, replace(health_of(SLOW, slow), num_paced=6)).startswith("nothing broken was found; worn: ")
    assert world.condition("Straggling") == ("True", "RanksSlow")
    assert world.messages("RanksSlow") == ["digits-0 on node a: slow-rank on rank 1 is suspect: busy for long"]
    say(world, health_of(SLOW))
    assert world.condition("Straggling") == ("Unknown", "PaceNotMeasured")


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        pytest.param({"mode": "Perhaps"}, "spec.health.stragglers.mode", id="another mode"),
        pytest.param({"windowSeconds": 1}, "spec.health.stragglers.windowSeconds", id="a short window"),
        pytest.param({"pipelineStages": 0}, "spec.health.stragglers.pipelineStages", id="no stage"),
        pytest.param({"pipelineStages": 4096}, "health.stragglers.pipelineStages: want 1 to", id="more than ranks"),
    ],
)
def test_unsound_settings_of_stragglers_are_named(spec: dict[str, Any], where: str) -> None:
    verdict = admit(a_job(health={"stragglers": spec}))
    assert isinstance(verdict, InvalidSpec)
    assert where in verdict.message


def test_numbers_of_pods_that_change_all_the_time_write_no_status() -> None:
    world = running_world()
    say(world, health_of(SLOW, unchecked=(("ports", 1),)))
    num_writes = world.num_status_writes
    for num_pods in (2, 3, 1):
        say(world, health_of(SLOW, unchecked=(("ports", num_pods),)))
    assert world.num_status_writes == num_writes


def moved(world: World, **changes: Any) -> None:
    """Let the ranks of digits-0 have moved to the spare, as the rendezvous reports it."""
    world.rendezvous_says(JobPhase.RUNNING, ["digits-1", "digits-2"], ["digits-0"], health=health_of(LOST))
    assert world.report is not None
    pods = tuple(replace(pod, unfit=WHY) if pod.pod == "digits-0" else pod for pod in world.report.pods)
    world.report = replace(world.report, pods=pods, **changes)


def test_a_pod_that_lost_its_ranks_to_a_finding_is_deleted_and_another_one_made() -> None:
    world = running_world(health={"mode": "Act"})
    moved(world)
    world.settle()
    assert [(item.name, item.why) for item in world.deleted] == [("digits-0", f"it was found to be broken: {WHY}")]
    assert "digits-3" in world.names()


@pytest.mark.parametrize(
    ("spec", "changes", "is_reachable"),
    [
        pytest.param({}, {}, True, id="the job only observes"),
        pytest.param({"health": {"mode": "Act"}}, {"phase": JobPhase.INTERRUPTED}, True, id="in a recovery"),
        pytest.param({"health": {"mode": "Act"}}, {}, False, id="the report is an old one"),
    ],
)
def test_no_pod_is_deleted_for_a_finding(spec: dict[str, Any], changes: dict[str, Any], is_reachable: bool) -> None:
    world = running_world(**spec)
    moved(world, **changes)
    world.is_reachable = is_reachable
    world.actions()
    world.settle()
    assert world.deleted == []


def test_a_pod_with_ranks_is_never_deleted_for_a_finding() -> None:
    world = running_world(health={"mode": "Act"})
    world.rendezvous_says(JobPhase.RUNNING, ["digits-0", "digits-1"], ["digits-2"], health=health_of(LOST))
    assert world.report is not None
    world.report = replace(world.report, pods=tuple(replace(pod, unfit=WHY) for pod in world.report.pods[:2]))
    world.settle()
    assert world.deleted == []


def test_a_broken_device_counts_against_its_node() -> None:
    world = running_world()
    world.nodes["b"] = a_node("b", rack="r1", nvlink="n1")
    recovery = a_recovery(1, cause=Cause.DEVICE_FAULT, node="a")
    say(world, health_of(LOST), recoveries=(recovery,))
    assert [(item["name"], item["faults"]) for item in world.job["status"]["suspectNodes"]] == [("a", 1)]


@pytest.mark.parametrize(
    "health",
    [
        pytest.param(replace(health_of(LOST), findings=health_of(LOST).findings * 65), id="too many findings"),
        pytest.param(replace(health_of(LOST), num_pods=1 << 40), id="more pods than the job has"),
        pytest.param(health_of(LOST, unchecked=(("rm -rf /", 1),)), id="a check that is no name"),
        pytest.param(health_of(LOST, held="x" * 3000), id="a long sentence"),
        pytest.param(
            replace(health_of(), findings=(PodFinding("digits-0; rm", "a", LOST),)), id="a pod that is no name"
        ),
        pytest.param(health_of(replace(LOST, message="x" * 301)), id="a long message"),
    ],
)
def test_a_report_with_health_that_cannot_be_is_refused(health: HealthStatus) -> None:
    world = running_world()
    say(world, health_of(LOST))
    assert world.report is not None
    limits = report_limits(world.job["spec"], 3)
    assert read_report(encode(world.report).encode(), limits).health == health_of(LOST)
    with pytest.raises(WireError):
        read_report(encode(replace(world.report, health=health)).encode(), limits)


EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\r\nI unbroken: forged \u2028\x00\x7f<script>alert(1)</script>\"'`{{7*7}} "


def test_whatever_pods_say_of_their_health_is_a_report_that_is_read_and_a_line_that_does_nothing() -> None:
    """Seen before: one check of which a pod knew a part, and the operator read no report of its job any more."""
    entity, message = (EVIL * 4)[:128], (EVIL * 9)[:300]
    bench = WatchedBench(replace(SETTINGS, health=HealthMode.OBSERVE))
    for number, pod in enumerate(("p0", "p1", "p2")):
        parts = Finding("gpu", entity, Verdict.UNKNOWN, NOT_TOLD), Finding("gpu", "GPU-a", Verdict.FATAL, "lost")
        many = (
            Finding(f"c-{number}_{index}", f"{index}{entity[3:]}", verdict, "x.Y-9_", "\x1b" * 100, message, 3)
            for index, verdict in enumerate((Verdict.FATAL, Verdict.SUSPECT, Verdict.DEGRADED, Verdict.UNKNOWN) * 15)
        )
        said = encode(Health((*parts, Finding("", "", Verdict.UNKNOWN), *many)))
        bench.find(pod, *decode(said, Health).findings)
    health = bench.status().health
    assert health is not None
    assert ("gpu.in-part", 3) in health.unchecked
    assert len(health.unchecked) > 40
    world = running_world()
    for told in (health, replace(health, unchecked=(("gpu (in part)", 3),))):
        shown = say(world, told)
        assert world.report is not None
        read = read_report(encode(world.report).encode(), report_limits(world.job["spec"], 3)).health
        assert read == world.report.health
        (event,) = world.messages("DevicesFaulty")
        for text in (shown, event):
            assert text.isprintable()
            assert len(text) <= 1000
            assert "is fatal" in text


RULE = {"name": "loss", "pattern": "loss=[0-9]", "verdict": "hang", "recurringSeconds": 600, "ranks": "Every"}


def test_log_rules_of_a_job_are_those_of_its_rendezvous_and_agents() -> None:
    verdict = valid(health={"logRules": [RULE, {"name": "io", "pattern": r"^retry \$(X)", "verdict": "slow"}]})
    rules = (
        LogRule("loss", "loss=[0-9]", LogVerdict.HANG, None, 600.0, LogRanks.EVERY),
        LogRule("io", r"^retry \$(X)", LogVerdict.SLOW),
    )
    assert verdict.settings.log_rules == rules
    pod = training_pod(verdict.spec, verdict.settings, 7, Role.ACTIVE, OperatorOptions("sidecar:1"))["spec"]
    (agent,) = (one for one in pod["initContainers"] if one["name"] == "unbroken-agent")
    (text,) = (one["value"] for one in agent["env"] if one["name"] == "UNBROKEN_SETTINGS")
    assert "$$(X)" in text, "the kubelet would replace $(X)"
    assert settings_from_json(text.replace("$$(", "$(")) == verdict.settings
    assert "log_rules" not in settings_to_json(valid().settings)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        pytest.param([{**RULE, "pattern": "(a"}], "spec.health.logRules[0].pattern: want a ) for this (", id="pattern"),
        pytest.param([{**RULE, "expectedWithinSeconds": 5}], "spec.health.logRules[0]: want one of", id="two times"),
        pytest.param([RULE, RULE], "spec.health.logRules: want different names", id="one name twice"),
        pytest.param([{**RULE, "recurringSeconds": 0}], "spec.health.logRules[0].recurringSeconds", id="no time"),
        pytest.param([{**RULE, "verdict": "fatal"}], "spec.health.logRules[0].verdict", id="no verdict"),
        pytest.param([{**RULE, "pattern": "x" * 300}], "spec.health.logRules[0].pattern", id="long"),
        pytest.param([RULE] * 17, "spec.health.logRules", id="many"),
        pytest.param([{**RULE, "name": "No Name"}], "spec.health.logRules[0].name", id="name"),
    ],
)
def test_a_log_rule_that_cannot_be_is_refused_with_its_field(rules: list[dict[str, Any]], said: str) -> None:
    verdict = admit(a_job(health={"logRules": rules}))
    assert isinstance(verdict, InvalidSpec)
    assert any(text.startswith(said) for text in verdict.violations), verdict.violations


def test_what_a_log_rule_calls_slow_is_in_the_condition_of_slow_ranks_and_no_word_against_nodes() -> None:
    world = running_world()
    found = Finding(LOG_LINES, "io", Verdict.DEGRADED, message="rank 0: a line matches: retry")
    assert say(world, replace(health_of(found), num_pods=0)) == "", "no watch has said anything"
    assert world.condition("Straggling") == ("True", "RanksSlow")
    assert world.messages("RanksSlow") == ["digits-0 on node a: log rule io: rank 0: a line matches: retry"]
    message = say(world, health_of(SLOW, found))
    assert "log rule" not in message
    assert message.startswith("nothing broken was found; worn: digits-0 on node a: throttled on GPU-b is degraded")


def preflight_variables(verdict: ValidSpec) -> dict[str, str]:
    pod = training_pod(verdict.spec, verdict.settings, 7, Role.ACTIVE, OperatorOptions("sidecar:1"))["spec"]
    variables = pod["containers"][0]["env"]
    return {one["name"]: one["value"] for one in variables if one["name"].startswith("UNBROKEN_PREFLIGHT")}


def test_a_job_that_says_nothing_of_a_preflight_has_none_of_it() -> None:
    plain = valid()
    assert (plain.settings.preflight, preflight_variables(plain)) == (HealthMode.OFF, {})
    assert "preflight" not in settings_to_json(plain.settings)
    off = valid(health={"preflight": {"mode": "Off", "timeoutSeconds": 30}})
    assert (preflight_variables(off), template_digest(off.spec)) == ({}, template_digest(plain.spec))


@pytest.mark.parametrize("mode", [HealthMode.OBSERVE, HealthMode.ACT])
def test_pods_are_told_how_long_to_test_themselves_and_how_many_gpus_they_have(mode: HealthMode) -> None:
    spec = {"preflight": {"mode": mode.value, "timeoutSeconds": 45}}
    job = a_job(health=spec)
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 8, "cpu": "4"}}
    verdict = admit(job)
    assert isinstance(verdict, ValidSpec), verdict
    assert preflight_variables(verdict) == {"UNBROKEN_PREFLIGHT": "45", "UNBROKEN_PREFLIGHT_DEVICES": "8"}
    assert settings_from_json(settings_to_json(verdict.settings)) == verdict.settings
    assert (verdict.settings.preflight, verdict.settings.preflight_s) == (mode, 45.0)
    assert preflight_variables(valid(health=spec)) == {"UNBROKEN_PREFLIGHT": "45"}


def test_pods_that_test_with_each_other_are_told_so_and_made_anew_for_it() -> None:
    alone = valid(health={"preflight": {"mode": "Act"}})
    pairs = valid(health={"preflight": {"mode": "Act", "pairs": True}})
    assert preflight_variables(pairs) == {"UNBROKEN_PREFLIGHT": "120", "UNBROKEN_PREFLIGHT_PAIRS": "1"}
    assert (pairs.settings.preflight_pairs, alone.settings.preflight_pairs) == (True, False)
    assert settings_from_json(settings_to_json(pairs.settings)) == pairs.settings
    assert "pairs" not in settings_to_json(alone.settings)
    assert template_digest(pairs.spec) != template_digest(alone.spec)


def test_tests_of_pairs_without_a_preflight_are_refused() -> None:
    verdict = admit(a_job(health={"preflight": {"pairs": True}}))
    assert isinstance(verdict, InvalidSpec)
    said = "health.preflight.pairs: want health.preflight.mode Observe or Act for tests of pairs, got Off"
    assert any(said in text for text in verdict.violations), verdict.violations


def test_pods_are_made_anew_for_what_they_test_and_not_for_what_becomes_of_it() -> None:
    observed, acted_on = (valid(health={"preflight": {"mode": mode}}) for mode in ("Observe", "Act"))
    assert template_digest(observed.spec) == template_digest(acted_on.spec) != template_digest(valid().spec)


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        pytest.param({"mode": "Perhaps"}, "spec.health.preflight.mode", id="another mode"),
        pytest.param({"timeoutSeconds": 9}, "spec.health.preflight.timeoutSeconds", id="too short"),
        pytest.param({"timeoutSeconds": 301}, "spec.health.preflight.timeoutSeconds", id="too long"),
        pytest.param({"mode": "Act"}, "want less than timeouts.startupSeconds (60)", id="no time left to get ready"),
    ],
)
def test_unsound_settings_of_the_preflight_are_named(spec: dict[str, Any], where: str) -> None:
    timeouts = {"softSeconds": 4, "hardSeconds": 6, "barrierSeconds": 60, "startupSeconds": 60}
    verdict = admit(a_job(health={"preflight": spec}, timeouts=timeouts))
    assert isinstance(verdict, InvalidSpec)
    assert where in verdict.message


def test_a_pod_whose_preflight_has_failed_is_replaced_in_a_job_that_acts_on_it_alone() -> None:
    world = running_world(health={"mode": "Off", "preflight": {"mode": "Act"}})
    moved(world)
    world.settle()
    assert [item.name for item in world.deleted] == ["digits-0"]
    world = running_world(health={"mode": "Off", "preflight": {"mode": "Observe"}})
    moved(world)
    world.settle()
    assert world.deleted == []
