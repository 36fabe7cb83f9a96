"""Patterns of log rules: the answers of `re`, in time that the line alone determines."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken_core.protocol.log_rules.checking import rule_violations
from unbroken_core.protocol.log_rules.matcher import MAX_CELLS, Matcher
from unbroken_core.protocol.log_rules.rules import MAX_PATTERN, MAX_RULES, LogRule, LogVerdict
from unbroken_core.protocol.log_rules.syntax import MAX_POSITIONS, Node, PatternError

ATOMS = ("a", "b", "1", "é", ".", "[ab]", "[^a]", "[a-c1]", r"\d", r"\w", r"\S", r"\.", r"\x62")
REPEATS = ("*", "+", "?", "{2}", "{1,3}", "{2,}", "{0,2}", "*?", "+?")


def _larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(parts, min_size=1, max_size=3).map("".join),
        st.lists(parts, min_size=1, max_size=3).map(lambda options: f"({'|'.join(options)})"),
        st.tuples(parts, st.sampled_from(REPEATS)).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


BODIES = st.recursive(st.sampled_from(ATOMS), _larger, max_leaves=5)
ALTERNATIVES = st.tuples(st.sampled_from(("", "^")), BODIES, st.sampled_from(("", "$"))).map("".join)
PATTERNS = st.tuples(st.sampled_from(("", "(?i)")), st.lists(ALTERNATIVES, min_size=1, max_size=2).map("|".join))
LINES = st.text("abcA1é. ", max_size=8).map(str.encode) | st.binary(max_size=8).map(
    lambda text: text.replace(b"\n", b"").replace(b"\r", b"")
)


@settings(max_examples=400, deadline=None)
@given(PATTERNS.map("".join), st.lists(LINES, min_size=1, max_size=5))
def test_a_pattern_matches_where_re_finds_it(pattern: str, lines: list[bytes]) -> None:
    matcher, reference = Matcher(pattern), re.compile(pattern.encode())
    for line in lines:
        found = reference.search(line) is not None
        assert matcher.matches(line) is found, line
        assert not found or matcher.required in line.lower()


@pytest.mark.parametrize(
    ("pattern", "required"),
    [
        (r"loss=\d+", b"loss="),
        ("(?i)OutOfMemory x", b"outofmemory x"),
        ("ab(c|d)efg", b"efg"),
        ("(abc)+d?x", b"abc"),
        ("abc|abd", b""),
        (r"\d+", b""),
    ],
)
def test_a_text_that_each_match_has_is_known(pattern: str, required: bytes) -> None:
    assert Matcher(pattern).required == required


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("", "want a pattern, got an empty one"),
        ("(?i)", r"want a pattern after \(\?i\)"),
        ("x" * (MAX_PATTERN + 1), f"want at most {MAX_PATTERN} characters, got {MAX_PATTERN + 1}"),
        ("a\nb", "want one line of text, got a control character"),
        ("(?=a)", r"want \(\.\.\.\) or \(\?:\.\.\.\), .* got '\(\?=a\)' at character 1"),
        ("(?P<x>a)", r"want \(\.\.\.\) or"),
        ("a(?i)b", r"want \(\.\.\.\) or"),
        (r"(a)\1", r"want \\d \\D .* at character 4"),
        (r"\bx", r"want \\d \\D .* at character 1"),
        ("a\\", r"want \\d \\D .* at character 2"),
        ("a**", "want one repetition, .* at character 3"),
        ("a*+", "want one repetition, .* at character 3"),
        ("a{2}{3}", "want one repetition, .* at character 5"),
        ("*a", "want something before a repetition, .* at character 1"),
        ("(", r"want a \) for this \(, .* at character 1"),
        ("a)", r"want \( before \), .* at character 2"),
        ("x[ab", r"want a \] for this \[, .* at character 2"),
        ("[z-a]", "want a range from a lower to a higher character"),
        (r"[\d-a]", "want a range from a lower to a higher character"),
        ("[é]", r"want ASCII in \[\.\.\.\]"),
        ("a^b", r"want \^ only at the beginning"),
        ("a$b", r"want \^ only at the beginning"),
        ("(a$)", r"want \^ only at the beginning"),
        ("a{5,2}", "want 1 to 256 repetitions, the lower number first"),
        ("a{9999}", "want 1 to 256 repetitions"),
        ("(a{100}){100}", f"want at most {MAX_POSITIONS} bytes once repetitions are written out, got 10000"),
        ("((a{200}){200}){200}", f"want at most {MAX_POSITIONS} bytes"),
        ("(" * 20 + ")" * 20, "want at most 16 groups within each other"),
        ("a\ud800", "want characters of UTF-8, .* at character 2"),
    ],
)
def test_what_is_no_pattern_is_refused_with_what_was_wanted_and_where(pattern: str, said: str) -> None:
    with pytest.raises(PatternError, match=said):
        Matcher(pattern)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "(a|a)*b", "(a|ab|b)*c", ".*.*.*.*x", "(a?){100}a{100}b", "([ab]*a[ab]{100})c", "(.*a){50}x"],
)
@pytest.mark.parametrize("line", [b"a" * 2048, b"ab" * 1024, bytes(ord("ab"[i * i % 7 % 2]) for i in range(2048))])
def test_a_pattern_that_explodes_elsewhere_takes_one_step_for_each_byte(
    pattern: str, line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: a state is made, or looked up, once for each byte."""
    made = 0
    make = Matcher._make

    def count(self: Matcher, state: int) -> object:
        nonlocal made
        made += 1
        return make(self, state)

    monkeypatch.setattr(Matcher, "_make", count)
    matcher = Matcher(pattern)
    matcher.matches(line)
    assert made <= 2 * len(line)
    assert sum(map(len, matcher._rows.values())) <= MAX_CELLS


@pytest.mark.parametrize(
    "pattern",
    [
        "((((){99}){99}){99})",
        "(" * 5 + "()" + "{256})" * 5,
        "(" * 5 + "(|)" + "{256})" * 5 + "x",
        "(" * 8 + "(?:)" + "{256}|)" * 8,
        "(a" + "|" * 200 + "){256}",
        "((a|" + "()" * 100 + "){2}){128}",
    ],
)
def test_empty_texts_however_often_repeated_cost_nothing(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: parts of an automaton that are built."""
    built = 0
    build = Matcher._build

    def count(self: Matcher, node: Node) -> tuple[bool, int, int]:
        nonlocal built
        built += 1
        assert built < 10 * MAX_POSITIONS
        return build(self, node)

    monkeypatch.setattr(Matcher, "_build", count)
    assert Matcher(pattern).matches(b"x")


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [("^a(){3}b$", b"ab", b"aab"), ("^(|a|){2}$", b"aa", b"aaa"), ("^(a||b)c", b"c", b"dc"), ("^()$", b"", b"a")],
)
def test_empty_texts_match_as_they_should(pattern: str, yes: bytes, no: bytes) -> None:
    matcher = Matcher(pattern)
    assert (matcher.matches(yes), matcher.matches(no)) == (True, False)


def test_states_that_were_thrown_away_are_made_again() -> None:
    matcher = Matcher("([ab]*a[ab]{100})c")
    lines = [bytes(ord("ab"[(i * i + seed) % 11 % 2]) for i in range(2000)) for seed in range(5)]
    assert not any(matcher.matches(line) for line in lines)
    assert all(matcher.matches(line + b"a" + b"b" * 100 + b"c") for line in lines)


def test_admission_builds_no_automaton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator asks for each plan of a job, between those of all others."""

    def build(self: Matcher, node: Node) -> tuple[bool, int, int]:
        raise AssertionError("an automaton is built")

    monkeypatch.setattr(Matcher, "_build", build)
    rules = [LogRule(f"r{number}", "[^x]{256}", LogVerdict.SLOW) for number in range(MAX_RULES)]
    assert list(rule_violations(rules)) == []


def test_each_fault_of_a_list_of_rules_is_said_with_its_field() -> None:
    rules = (
        LogRule("loss", "loss=", LogVerdict.HANG, within_s=5.0, every_s=5.0),
        LogRule("loss", "(", LogVerdict.SLOW),
        LogRule("No Name", "x", LogVerdict.SLOW, every_s=0.0),
    )
    assert [text.partition(", got")[0] for text in rule_violations(rules)] == [
        "health.logRules: want different names",
        "health.logRules[0]: want one of expectedWithinSeconds and recurringSeconds",
        "health.logRules[1].pattern: want a ) for this (",
        "health.logRules[2].name: want at most 40 small letters, digits and -, a letter first",
        "health.logRules[2].recurringSeconds: want 1 to 86400 seconds",
    ]
    many = [LogRule(f"r{number}", "x", LogVerdict.SLOW) for number in range(MAX_RULES + 1)]
    assert list(rule_violations(many)) == ["health.logRules: want at most 16, got 17"]
