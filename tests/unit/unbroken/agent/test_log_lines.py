"""What an agent makes of the lines that its launcher has found."""

from dataclasses import replace

import pytest

from unbroken.agent.adapters.metrics import PodCollector, log_families
from unbroken.agent.decisions.events import (
    AgentMemory,
    Connected,
    Disconnected,
    LauncherAttached,
    LauncherReported,
    LinesReported,
    SendToLauncher,
    SendToRendezvous,
    Ticked,
    WatchReported,
    WorkerReported,
)
from unbroken.agent.decisions.log_lines import SLOW_S, LogLines
from unbroken.agent.decisions.member import PodMember
from unbroken.agent.decisions.place import LocalPlace
from unbroken_core.pod.pod_messages import Follow, LineMark, Lines, Processes, ProcessState, Spawn, WorkerReport
from unbroken_core.protocol.log_rules.rules import LogRanks, LogRule, LogVerdict
from unbroken_core.protocol.messages import PROTOCOL, Fault, Finish, Halted, Hello, RankPlan, WorkerState
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.findings import LOG_LINES, Finding, Health, Verdict
from unbroken_core.vocabulary.reasons import Cause, JobPhase, RankReason, Reason, WorkerPhase

from .test_member import IN_PROCESS, processes, ready, running
from .test_member import Pod as WholePod

HANG, SLOW, RESTART, STOP = LogVerdict.HANG, LogVerdict.SLOW, LogVerdict.FATAL_RESTART, LogVerdict.FATAL_STOP


class Pod:
    """Workers that enter an iteration at 100 s."""

    def __init__(self, *rules: LogRule, ranks: tuple[int | None, ...] = (0, 1), earlier: int = -1) -> None:
        self.lines = LogLines(rules, earlier)
        self.places = [LocalPlace(number) for number in range(len(ranks))]
        for place, rank in zip(self.places, ranks, strict=True):
            part = RankPlan(place.local_rank, rank, RankReason.FIRST)
            place.incarnation = replace(place.incarnation, part=part)
        self.workers = [WorkerState(number, 0, WorkerPhase.RUNNING, 4) for number in range(len(ranks))]
        self.counts: dict[tuple[int, int, str], int] = {}
        self.lines.note_entries(self.places, self.workers, 100.0)

    def mark(
        self, rule: str, at_s: float, local_rank: int = 0, incarnation: int = 0, *, told: bool = False
    ) -> LineMark:
        key = local_rank, incarnation, rule
        self.counts[key] = self.counts.get(key, 0) + 1
        return LineMark(local_rank, incarnation, rule, at_s, self.counts[key], "words", told)

    def take(self, looked_s: float, *marks: LineMark, now_s: float | None = None) -> dict[int, Fault]:
        """Return the faults that are found so far, by local rank."""
        now_s = looked_s if now_s is None else now_s
        self.lines.take(Lines(looked_s, marks), self.places, self.workers, now_s)
        found = {place.local_rank: place.incarnation.found for place in self.places}
        return {rank: fault for rank, fault in found.items() if fault is not None}

    def enter(self, iteration: int, at_s: float) -> None:
        for place in self.places:
            place.incarnation = replace(place.incarnation, found=None)
        self.workers = [replace(state, iteration=iteration) for state in self.workers]
        self.lines.note_entries(self.places, self.workers, at_s)


@pytest.mark.parametrize(
    ("verdict", "cause", "is_hang"),
    [(HANG, Cause.SOFT_TIMEOUT, True), (RESTART, Cause.LOG_RULE, False), (STOP, Cause.LOG_RULE, False)],
)
def test_a_match_is_a_fault_of_the_worker_in_the_iteration_that_runs(
    verdict: LogVerdict, cause: Cause, is_hang: bool
) -> None:
    pod = Pod(LogRule("boom", "x", verdict))
    text = "log rule boom: a line matches: words"
    found = pod.take(103.0, pod.mark("boom", 102.0, 1))
    assert found == {1: Fault(cause, 4, text, 1.0, is_hang=is_hang, rule="boom")}


def test_a_match_counts_once_and_in_its_own_iteration_only() -> None:
    pod = Pod(LogRule("boom", "x", RESTART))
    mark = pod.mark("boom", 102.0)
    pod.take(103.0, mark)
    pod.enter(5, 104.0)
    assert pod.take(105.0, mark) == {}, "repeated"
    assert pod.take(105.0, pod.mark("boom", 103.5)) == {}, "read before it entered"
    assert list(pod.take(106.0, pod.mark("boom", 105.5))) == [0]


@pytest.mark.parametrize("phase", [WorkerPhase.STOPPING, WorkerPhase.READY, WorkerPhase.GONE])
def test_what_stops_the_job_counts_whatever_followed_it_and_the_rest_does_not(phase: WorkerPhase) -> None:
    pod = Pod(LogRule("again", "x", RESTART), LogRule("end", "y", STOP))
    own = Fault(Cause.EXCEPTION, 4, "ValueError: y")
    pod.workers[0] = replace(pod.workers[0], phase=phase, fault=own)
    assert pod.take(103.0, pod.mark("again", 102.0)) == {}
    assert pod.take(103.0, pod.mark("end", 102.0))[0].rule == "end"


def test_what_stops_the_job_counts_from_the_process_before_as_well() -> None:
    pod = Pod(LogRule("end", "y", STOP))
    pod.places[0].advance(1)
    pod.places[0].incarnation = replace(pod.places[0].incarnation, part=RankPlan(0, 0, RankReason.FIRST))
    pod.workers[0] = WorkerState(0, 1, WorkerPhase.STARTING)
    fault = pod.take(103.0, pod.mark("end", 102.0))[0]
    assert (fault.rule, fault.iteration) == ("end", 4), "else it would seem to be of one that never had a rank"


def test_a_stop_outdoes_a_hang_that_was_found_before() -> None:
    pod = Pod(LogRule("hang", "x", HANG), LogRule("end", "y", STOP))
    pod.take(103.0, pod.mark("hang", 102.0))
    assert pod.take(104.0, pod.mark("end", 103.0))[0].rule == "end"


def test_a_stop_outdoes_a_restart_that_was_found_before_and_the_first_stop_stays() -> None:
    pod = Pod(LogRule("again", "x", RESTART), LogRule("end", "y", STOP), LogRule("other", "z", STOP))
    assert pod.take(103.0, pod.mark("again", 102.0))[0].rule == "again"
    assert pod.take(103.3, pod.mark("end", 103.2))[0].rule == "end"
    assert pod.take(104.0, pod.mark("other", 103.9), pod.mark("again", 103.9))[0].rule == "end"


def test_spares_and_rules_that_nobody_gave_say_nothing() -> None:
    pod = Pod(LogRule("end", "y", STOP), ranks=(0, None))
    assert pod.take(103.0, pod.mark("end", 102.0, 1), pod.mark("other", 102.0), pod.mark("end", 102.0, 7)) == {}
    assert len(pod.lines._marks) == 1


@pytest.mark.parametrize(
    ("looked_s", "at_s", "is_found"),
    [
        pytest.param(109.0, None, False, id="not yet"),
        pytest.param(111.0, None, True, id="overdue"),
        pytest.param(111.0, 105.0, False, id="it came"),
        pytest.param(111.0, 99.0, True, id="it came before this iteration"),
        pytest.param(500.0, 110.9, False, id="late, and here before that was seen"),
    ],
)
def test_a_line_is_expected_within_a_time_from_the_entry(looked_s: float, at_s: float | None, is_found: bool) -> None:
    pod = Pod(LogRule("first", "x", HANG, within_s=10.0))
    marks = [] if at_s is None else [pod.mark("first", at_s)]
    found = pod.take(looked_s, *marks)
    assert list(found) == ([0] if is_found else [])
    assert all(fault.detail == "log rule first: no line has matched within 10 s" for fault in found.values())


def test_a_launcher_that_got_no_processor_makes_no_line_missing() -> None:
    pod = Pod(LogRule("first", "x", HANG, within_s=10.0))
    assert pod.take(101.0, now_s=900.0) == {}
    assert list(pod.take(111.0, now_s=901.0)) == [0]


def test_a_claim_of_the_future_makes_no_line_missing() -> None:
    pod = Pod(LogRule("first", "x", HANG, within_s=10.0))
    assert pod.take(1e9, now_s=105.0) == {}


def test_a_line_that_recurs_is_missed_only_after_the_first() -> None:
    pod = Pod(LogRule("loss", "x", RESTART, every_s=5.0))
    assert pod.take(190.0) == {}
    assert pod.take(191.0, pod.mark("loss", 190.5)) == {}
    assert pod.take(195.5) == {}
    found = pod.take(197.0)
    assert found[0].detail == "log rule loss: no line has matched for 5 s"
    assert found[0].detect_s == pytest.approx(1.5)
    pod.enter(5, 198.0)
    assert pod.take(300.0) == {}, "in each iteration anew"


@pytest.mark.parametrize(("ranks", "found"), [(LogRanks.FIRST, [0]), (LogRanks.EVERY, [0, 1])])
def test_lines_are_expected_of_rank_0_or_of_every_rank(ranks: LogRanks, found: list[int]) -> None:
    pod = Pod(LogRule("first", "x", HANG, within_s=10.0, ranks=ranks), ranks=(0, 1, None))
    assert list(pod.take(120.0)) == found


def test_a_worker_that_waits_after_a_step_as_it_was_told_to_owes_no_line() -> None:
    pod = Pod(LogRule("loss", "x", HANG, every_s=5.0))
    pod.take(101.0, pod.mark("loss", 101.0))
    pod.workers[0] = replace(pod.workers[0], halted=Halted(1, 1, 7, is_held=True))
    pod.lines.note_entries(pod.places, pod.workers, 120.0)
    assert pod.take(121.0) == {}
    assert list(pod.take(126.0)) == [0]


def test_a_restarted_agent_takes_what_was_told_before_for_known_and_the_rest_for_news() -> None:
    pod = Pod(LogRule("boom", "x", RESTART), LogRule("loss", "y", HANG, every_s=5.0), earlier=4)
    assert pod.take(101.0, pod.mark("boom", 90.0, told=True), pod.mark("loss", 95.0, told=True)) == {}
    assert list(pod.take(101.0, pod.mark("boom", 99.0, 1))) == [1], "found while no agent was there"
    assert list(pod.take(106.0)) == [0, 1], "what recurred before is expected still"


@pytest.mark.parametrize("incarnation", [0, 1])
def test_a_restarted_agent_takes_for_news_what_stops_the_job_as_the_one_before_may_not_have_told_it(
    incarnation: int,
) -> None:
    pod = Pod(LogRule("end", "x", STOP), earlier=4)
    pod.places[0].incarnation = replace(pod.places[0].incarnation, number=incarnation)
    pod.workers[0] = replace(pod.workers[0], incarnation=incarnation)
    mark = pod.mark("end", 90.0, told=True)
    found = pod.take(101.0, mark)
    assert (found[0].rule, found[0].iteration) == ("end", 4)
    pod.take(102.0, mark)
    assert pod.lines.num_spoken == {"end": 1}


def test_what_is_slow_is_told_for_ten_minutes_or_until_the_line_comes() -> None:
    pod = Pod(LogRule("io", "x", SLOW), LogRule("loss", "y", SLOW, every_s=5.0))
    assert pod.take(102.0, pod.mark("io", 101.0, 1), pod.mark("io", 101.0, 0), pod.mark("loss", 101.0)) == {}
    io = Finding(LOG_LINES, "io", Verdict.DEGRADED, message="rank 0: a line matches: words")
    loss = Finding(LOG_LINES, "loss", Verdict.DEGRADED, message="rank 0: no line has matched for 5 s")
    assert [*pod.lines.findings] == [io]
    assert pod.take(110.0) == {}
    assert [*pod.lines.findings] == [io, loss]
    pod.take(111.0, pod.mark("loss", 110.5))
    assert [*pod.lines.findings] == [io]
    assert not pod.lines.expire(101.0 + SLOW_S)
    assert pod.lines.expire(103.0 + SLOW_S)
    assert [*pod.lines.findings] == []


@pytest.mark.parametrize("change", ["it is a spare", "it has left", "another iteration", "another process"])
def test_a_line_is_missing_no_longer_than_the_worker_is_in_the_iteration_in_which_it_was(change: str) -> None:
    pod = Pod(LogRule("io", "x", SLOW), LogRule("first", "y", SLOW, within_s=10.0))
    pod.take(120.0, pod.mark("io", 119.0))
    assert [finding.entity for finding in pod.lines.findings] == ["io", "first"]
    assert not pod.lines.note_entries(pod.places, pod.workers, 121.0)
    place, state = pod.places[0], pod.workers[0]
    if change == "it is a spare":
        place.incarnation = replace(place.incarnation, part=RankPlan(0, None, RankReason.FIRST))
    elif change == "it has left":
        pod.workers[0] = replace(state, phase=WorkerPhase.READY)
    elif change == "another iteration":
        pod.workers[0] = replace(state, iteration=5)
    else:
        place.incarnation = replace(place.incarnation, number=1)
        pod.workers[0] = replace(state, incarnation=1)
    assert pod.lines.note_entries(pod.places, pod.workers, 122.0)
    assert [finding.entity for finding in pod.lines.findings] == ["io"], "a match counts for ten minutes"


def test_that_a_line_is_not_missing_any_more_is_told_without_another_word_of_the_launcher() -> None:
    pod = WholePod(replace(IN_PROCESS, log_rules=(LogRule("first", "x", SLOW, within_s=1.0),)))
    pod.run()
    pod.after(5.0)
    pod.step(LinesReported(Lines(pod.now_s)))
    health = pod.member.reporter.health
    assert health is not None
    assert [finding.entity for finding in health.findings] == ["first"]
    pod.step(WorkerReported(0, 0, ready(0, 0)))
    assert pod.member.reporter.health == Health(())


def test_what_a_pod_keeps_of_its_processes_is_bounded() -> None:
    pod = Pod(LogRule("end", "y", STOP), ranks=(0,))
    for number in range(50):
        pod.places[0].advance(number)
        marks = [LineMark(0, incarnation, "end", 1.0, 1, "") for incarnation in range(number + 300)]
        pod.take(100.0, *marks)
    assert len(pod.lines._marks) <= 2
    assert len(pod.lines._handled) <= 2


def member(*rules: LogRule) -> PodMember:
    settings = JobSettings("digits", log_rules=rules)
    identity = Hello(PROTOCOL, "digits", "p0", "uid", "s", "n", 1)
    return PodMember(settings, identity, "127.0.0.1", AgentMemory(), 0.0)


def test_the_launcher_is_told_the_rules_before_it_starts_anything_and_only_where_there_are_some() -> None:
    rule = LogRule("io", "x", SLOW)
    state = LauncherReported(Processes((ProcessState(0, -1, 0),)))
    orders = []
    for rules in ((), (rule,)):
        pod = member(*rules)
        pod.take(LauncherAttached(), 1.0)
        actions = pod.step(state, 1.0)
        orders.append([action.message for action in actions if isinstance(action, SendToLauncher)])
    assert [type(order) for order in orders[0]] == [Spawn]
    assert [type(order) for order in orders[1]] == [Follow, Spawn]
    assert orders[1][0] == Follow((rule,))


def test_metrics_say_how_often_each_rule_has_spoken_and_what_was_passed_over_only_where_there_are_rules() -> None:
    assert not [one for one in PodCollector(member(), lambda: 0, lambda: 0).collect() if "log_rule" in one.name]
    pod = Pod(LogRule("io", "x", SLOW), LogRule("end", "y", STOP))
    pod.lines.take(Lines(1.0, (pod.mark("io", 101.0), pod.mark("io", 102.0, 1)), 7), pod.places, pod.workers, 102.0)
    told = {
        (sample.name, *sample.labels.values()): sample.value
        for family in log_families(pod.lines)
        for sample in family.samples
    }
    assert told == {
        ("unbroken_log_rule_spoken_total", "io"): 2,
        ("unbroken_log_rule_spoken_total", "end"): 0,
        ("unbroken_log_rules_skipped_bytes_total",): 7,
    }


def test_what_is_slow_is_told_beside_what_the_watch_has_found_or_alone() -> None:
    pod = member(LogRule("io", "x", SLOW))
    pod.places[0].incarnation = replace(pod.places[0].incarnation, part=RankPlan(0, 0, RankReason.FIRST))
    pod.log_lines.note_entries(pod.places, (WorkerState(0, 0, WorkerPhase.RUNNING, 4),), 1.0)
    slow = Finding(LOG_LINES, "io", Verdict.DEGRADED, message="rank 0: a line matches: w")
    running = (WorkerState(0, 0, WorkerPhase.RUNNING, 4),)
    pod.log_lines.take(Lines(2.0, (LineMark(0, 0, "io", 2.0, 1, "w"),)), pod.places, running, 2.0)
    pod.take(LinesReported(Lines(2.0)), 2.0)
    assert pod.reporter.health == Health((slow,))
    fine = Finding("clock", "", Verdict.OK)
    pod.take(WatchReported(Health((fine,), 3)), 3.0)
    assert pod.reporter.health == Health((slow, fine), 3)
    pod.take(Ticked(), 2.0 + SLOW_S)
    assert pod.reporter.health == Health((fine,), 3)


@pytest.mark.parametrize(
    "next_event", [WorkerReported(1, 0, ready(1, 0)), LauncherReported(processes(running(0), running(1, 1)))]
)
def test_what_stops_the_job_is_told_until_it_has_ended_whatever_the_worker_or_its_successor_says(
    next_event: WorkerReported | LauncherReported,
) -> None:
    pod = WholePod(replace(IN_PROCESS, log_rules=(LogRule("end", "x", STOP),)))
    pod.run()
    pod.step(Disconnected())
    pod.step(LinesReported(Lines(pod.now_s, (LineMark(1, 0, "end", pod.now_s, 1, "words"),))))
    pod.step(next_event)
    (hello,) = (action.message for action in pod.step(Connected()) if isinstance(action, SendToRendezvous))
    assert isinstance(hello, Hello)
    told = [None if worker.fault is None else (worker.fault.rule, worker.fault.iteration) for worker in hello.workers]
    assert told == [None, ("end", 0)]
    number = pod.member.places[1].incarnation.number
    newer = Fault(Cause.EXCEPTION, 1, "ValueError: x")
    pod.step(WorkerReported(1, number, WorkerReport(WorkerPhase.STOPPING, 1, fault=newer)))
    assert pod.member.workers[1].fault == newer, "a rendezvous that gave out another iteration knows no such rule"
    pod.step(WorkerReported(1, number, ready(1, 1)))
    assert pod.member.workers[1].fault is not None
    pod.hear(Finish(1, JobPhase.FAILED, Reason.FATAL_LINE, "over"))
    assert pod.member.workers[1].fault is None
