"""What the launcher finds in workers' output, and what that may cost."""

import random

import pytest

from unbroken.launch.line_rules import MAX_LINE_BYTES, LineRules, Tap
from unbroken_core.pod.pod_messages import LineMark, Lines
from unbroken_core.protocol import wire
from unbroken_core.protocol.log_rules.rules import MAX_SHOWN, LogRule, LogVerdict

ERROR = LogRule("error", "^error: .*", LogVerdict.FATAL_RESTART)
LOSS = LogRule("loss", "loss=", LogVerdict.HANG, every_s=60.0)


class Launcher:
    """The rules of one launcher, with clocks that stand still unless they are moved."""

    def __init__(self, *rules: LogRule) -> None:
        self.now_s, self.cpu_s, self.cost_s = 100.0, 0.0, 0.0
        self.rules = LineRules(rules, lambda: self.now_s, self._cpu)

    def _cpu(self) -> float:
        self.cpu_s += self.cost_s
        return self.cpu_s

    def tap(self, local_rank: int = 0, incarnation: int = 0) -> Tap:
        return self.rules.tap(local_rank, incarnation)()

    def told(self, after_s: float = 1.0) -> Lines | None:
        self.now_s += after_s
        return self.rules.take(self.now_s)

    def marks(self, after_s: float = 1.0) -> tuple[LineMark, ...]:
        lines = self.told(after_s)
        return () if lines is None else lines.marks


@pytest.mark.parametrize(
    ("pieces", "line"),
    [
        pytest.param([b"a\nerror: disk\nb\n"], "error: disk", id="among others"),
        pytest.param([b"err", b"or: di", b"sk\n"], "error: disk", id="in pieces"),
        pytest.param([b"50%\rerror: disk\r60%"], "error: disk", id="between the states of a progress bar"),
        pytest.param([b"an error: disk\n"], None, id="not at the beginning of the line"),
        pytest.param([b"error: disk"], None, id="a line that has not ended"),
        pytest.param([b"x" * 5000, b"error: disk\n"], None, id="the rest of a long line is no line"),
        pytest.param([b"x" * 5000, b"\nerror: disk\n"], "error: disk", id="after a long line"),
        pytest.param(
            [b"x" * 50_000 + b"\nerror: \x00\xff\x1b[1m\n"], r"error: \x00" + "\ufffd" + r"\x1b[1m", id="garbage"
        ),
        pytest.param(
            [b"error: " + b"y" * 9000 + b"\n"], ("error: " + "y" * 9000)[:MAX_SHOWN], id="as much as is shown"
        ),
    ],
)
def test_a_line_is_found_however_it_comes(pieces: list[bytes], line: str | None) -> None:
    launcher = Launcher(ERROR)
    tap = launcher.tap()
    for piece in pieces:
        tap.feed(piece)
    assert [mark.line for mark in launcher.marks()] == ([] if line is None else [line])


def test_the_last_line_counts_although_it_has_no_end() -> None:
    launcher = Launcher(ERROR)
    tap = launcher.tap()
    tap.feed(b"error: disk")
    tap.end()
    assert launcher.marks() == (LineMark(0, 0, "error", 100.0, 1, "error: disk"),)


def test_a_line_of_ten_megabytes_is_kept_as_two_kilobytes_and_looked_at_once() -> None:
    launcher = Launcher(LogRule("x", "x", LogVerdict.SLOW))
    tap = launcher.tap()
    for _ in range(160):
        tap.feed(b"y" * 65_536)
    assert len(tap._begun) == MAX_LINE_BYTES
    tap.feed(b"x\n")
    assert launcher.marks() == ()
    tap.feed(b"x\n")
    assert [mark.line for mark in launcher.marks()] == ["x"]


def test_of_a_rule_that_matches_everything_one_line_is_told_at_a_time() -> None:
    launcher = Launcher(LogRule("all", ".*", LogVerdict.SLOW))
    tap = launcher.tap()
    told: list[LineMark] = []
    for second in range(10):
        for _ in range(100):
            tap.feed(b"line\n" * 1000)
        told += launcher.marks(0.25)
        assert len(told) == second + 1
    assert [mark.count for mark in told] == list(range(1, 11))


def test_output_of_both_streams_of_each_process_is_its_own() -> None:
    launcher = Launcher(ERROR)
    make = launcher.rules.tap(0, 3)
    out, errors, other = make(), make(), launcher.tap(1, 0)
    out.feed(b"err")
    errors.feed(b"or: a\n")
    other.feed(b"error: b\n")
    out.feed(b"or: c\n")
    assert {(mark.local_rank, mark.incarnation, mark.line) for mark in launcher.marks()} == {
        (1, 0, "error: b"),
        (0, 3, "error: c"),
    }


def test_a_match_is_told_at_once_and_news_of_it_four_times_a_second_at_most() -> None:
    launcher = Launcher(ERROR)
    tap = launcher.tap()
    assert (launcher.rules.due_s, launcher.told()) == (None, None)
    tap.feed(b"error: 1\n")
    assert len(launcher.marks(0.0)) == 1
    launcher.now_s += 0.2
    tap.feed(b"error: 2\n")
    assert launcher.marks(0.0) == ()
    launcher.now_s += 0.1
    tap.feed(b"error: 3\n")
    (mark,) = launcher.marks(0.0)
    assert (mark.count, mark.line) == (2, "error: 3")


def test_a_match_right_after_another_is_told_with_its_own_time_since_an_iteration_may_begin_in_between() -> None:
    launcher = Launcher(ERROR)
    tap = launcher.tap()
    tap.feed(b"error: 1\n")
    assert [(mark.at_s, mark.count) for mark in launcher.marks(0.0)] == [(100.0, 1)]
    for _ in range(2):
        launcher.now_s += 0.1
        tap.feed(b"error: 2\n")
    (mark,) = launcher.marks(0.1)
    assert (mark.count, mark.line) == (2, "error: 2")
    assert mark.at_s == pytest.approx(100.2)


def test_a_match_while_an_earlier_one_is_told_again_to_another_agent_is_news() -> None:
    launcher = Launcher(ERROR)
    tap = launcher.tap()
    tap.feed(b"error: 1\n")
    launcher.marks()
    launcher.rules.reconnect()
    tap.feed(b"error: 2\n")
    assert [(mark.count, mark.line, mark.is_told) for mark in launcher.marks()] == [(2, "error: 2", False)]


def test_while_lines_are_expected_it_is_told_every_second_until_when_all_was_looked_at() -> None:
    launcher = Launcher(LOSS)
    assert launcher.told() is None, "nobody prints yet"
    launcher.tap()
    launcher.rules.note_look(101.0, is_complete=True)
    launcher.rules.note_look(105.0, is_complete=False)
    assert launcher.told(5.0) == Lines(101.0)
    assert launcher.told(0.5) is None
    launcher.rules.note_look(106.0, is_complete=True)
    assert launcher.told(0.5) == Lines(106.0)


def test_another_agent_is_told_everything_as_known_before() -> None:
    launcher = Launcher(ERROR)
    tap = launcher.tap()
    tap.feed(b"error: 1\n")
    launcher.marks()
    launcher.tap(1).feed(b"error: 2\n")
    launcher.rules.reconnect()
    assert [(mark.line, mark.is_told) for mark in sorted(launcher.marks(), key=lambda mark: mark.local_rank)] == [
        ("error: 1", True),
        ("error: 2", False),
    ]


def test_another_agent_is_told_what_stops_the_job_of_the_process_before_as_well() -> None:
    launcher = Launcher(ERROR, LogRule("end", "corrupt$", LogVerdict.FATAL_STOP))
    launcher.tap().feed(b"error: 1\ndata is corrupt\n")
    launcher.marks()
    launcher.tap(0, 1)
    launcher.rules.reconnect()
    (mark,) = launcher.marks()
    assert (mark.rule, mark.incarnation, mark.line, mark.is_told) == ("end", 0, "data is corrupt", True)


def test_output_beyond_the_limit_is_passed_over_and_what_is_expected_counts_as_seen() -> None:
    launcher = Launcher(LOSS, LogRule("step", "step [0-9]+$", LogVerdict.SLOW))
    tap = launcher.tap()
    launcher.cost_s = 0.02
    for _ in range(20):
        tap.feed(b"step x\n" * 10)
    lines = launcher.told(0.0)
    assert lines is not None
    assert 0 < lines.num_skipped <= 20 * 70
    assert {(mark.rule, mark.line) for mark in lines.marks} == {("loss", "")}
    assert launcher.rules.complaint.startswith("log rules: worker 0 prints more than can be looked at with 10% of a ")
    launcher.rules.complaint = ""
    tap.feed(b"step x\n" * 10)
    assert launcher.rules.complaint == "", "it is said once a minute"
    launcher.cost_s, launcher.now_s = 0.0, launcher.now_s + 10.0
    tap.feed(b"step 7\n")
    assert "step" in {mark.rule for mark in launcher.marks()}, "later output is looked at again"


def test_random_bytes_do_no_harm_and_what_is_told_can_be_sent() -> None:
    source = random.Random(7)
    launcher = Launcher(LogRule("any", ".", LogVerdict.SLOW), LOSS)
    tap = launcher.tap()
    for _ in range(200):
        tap.feed(source.randbytes(source.randrange(1, 4096)))
        lines = launcher.told()
        if lines is not None:
            assert wire.decode(wire.encode(lines), Lines) == lines


def test_many_rules_that_match_one_line_stop_where_the_time_is_used_up() -> None:
    """Each asks for a line that takes long to match; the first one has matched already."""
    hard = [LogRule(f"hard-{number}", f"[ab]*a[ab]{{{240 - number}}}c", LogVerdict.SLOW) for number in range(15)]
    launcher = Launcher(*hard, LOSS)
    source = random.Random(3)
    line = bytes(source.choices(b"ab", k=1700)) + b"a" * 300 + b"c\n"
    tap = launcher.tap()
    # Each look at the clock finds that 0.03 s have passed; 0.1 s are left.
    launcher.cost_s = 0.03
    tap.feed(line)
    lines = launcher.told(0.0)
    assert lines is not None
    assert [mark.rule for mark in lines.marks] == ["hard-0", "hard-1", "hard-2", "loss"], "passed over counts as seen"
    assert lines.num_skipped == len(line) - 1
    assert launcher.rules._left_s > -0.1
