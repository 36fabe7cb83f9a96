"""The pattern language of log rules: what has an automaton, and nothing else. See docs/design/0027-log-rules.md.

    alternatives   a|b            at the outermost level each may begin with ^ and end with $
    repetition     * + ? {m} {m,} {m,n}
    bytes          abc  .  [a-z]  [^0-9]  \\d \\D \\w \\W \\s \\S \\t \\xHH  \\. and other escaped punctuation
    groups         (...)  (?:...)
    (?i)           at the beginning: ASCII letters match in both cases

A character beyond ASCII stands for its bytes in UTF-8. Backreferences, lookaround and \\b have no such automaton.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Union

from unbroken_core.protocol.log_rules.rules import MAX_PATTERN

MAX_POSITIONS: Final = 256
"""Bytes of a pattern once its repetitions are written out: a step costs at most so many operations."""
MAX_DEPTH: Final = 16
"""Groups within groups."""


class PatternError(ValueError):
    """Not a pattern of this language; says what was wanted and seen, and where."""


@dataclass(frozen=True)
class Bytes:
    """One byte of a set: bit n stands for byte n."""

    mask: int


@dataclass(frozen=True)
class Chain:
    """Parts one after the other; none: the empty text."""

    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Either:
    """One of several."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """At least `low` times, at most `high` times; None: without limit."""

    part: "Node"
    low: int
    high: int | None


Node = Union[Bytes, Chain, Either, Repeat]
_EMPTY: Final = Chain(())


@dataclass(frozen=True)
class Alternative:
    """One of the outermost alternatives of a pattern."""

    node: Node
    is_at_start: bool
    """Whether it matches at the beginning of a line only."""
    is_at_end: bool


def parse(pattern: str) -> tuple[Alternative, ...]:
    """Read a pattern. Raises PatternError."""
    if not pattern:
        raise PatternError("want a pattern, got an empty one, which every line matches")
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"want at most {MAX_PATTERN} characters, got {len(pattern)}")
    if any(ord(character) < 32 for character in pattern):
        raise PatternError("want one line of text, got a control character; \\t and \\xHH stand for such bytes")
    folds = pattern.startswith("(?i)")
    if pattern == "(?i)":
        raise PatternError("want a pattern after (?i), got the end")
    found = _Parser(pattern, 4 if folds else 0, folds).read()
    num_positions = sum(size(each.node) for each in found)
    if num_positions > MAX_POSITIONS:
        raise PatternError(
            f"want at most {MAX_POSITIONS} bytes once repetitions are written out, got {num_positions}: "
            "use * or + for long ones"
        )
    return found


def size(node: Node) -> int:
    """Return how many bytes it has once its repetitions are written out."""
    match node:
        case Bytes():
            return 1
        case Chain(parts=parts) | Either(options=parts):
            return sum(map(size, parts))
        case Repeat(part=part, low=low, high=high):
            return size(part) * max(low if high is None else high, 1)


def set_of(characters: str) -> int:
    """Return the mask of these ASCII characters."""
    return sum(1 << ord(character) for character in set(characters))


ALL: Final = (1 << 256) - 1
DIGITS: Final = set_of("0123456789")
LETTERS: Final = set_of("abcdefghijklmnopqrstuvwxyz") | set_of("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
WORD: Final = DIGITS | LETTERS | set_of("_")
SPACE: Final = set_of(" \t\n\r\f\v")
ANY: Final = ALL & ~set_of("\n\r")
_CLASSES = {"d": DIGITS, "w": WORD, "s": SPACE, "t": set_of("\t")}
_CLASSES |= {"D": ALL & ~DIGITS, "W": ALL & ~WORD, "S": ALL & ~SPACE}
_REPEATED = re.compile(r"\{(\d{1,4})(?:(,)(\d{0,4}))?\}", re.ASCII)
_ANCHORS = "want ^ only at the beginning and $ only at the end of the pattern or of an outermost alternative"


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, text: str, at: int, folds: bool) -> None:
        self._text, self._at, self._folds = text, at, folds
        self._depth = 0

    def read(self) -> tuple[Alternative, ...]:
        found = [self._alternative()]
        while self._peek() == "|":
            self._at += 1
            found.append(self._alternative())
        if self._at < len(self._text):
            self._refuse("want ( before )")
        return tuple(found)

    def _alternative(self) -> Alternative:
        is_at_start = self._peek() == "^"
        self._at += is_at_start
        node = self._sequence()
        is_at_end = self._peek() == "$"
        self._at += is_at_end
        if is_at_end and self._peek() not in ("", "|"):
            self._refuse(_ANCHORS)
        return Alternative(node, is_at_start, is_at_end)

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            if self._peek() == "$" and self._depth == 0:
                break
            part = self._repeated(self._atom())
            # Empty texts, repeated within each other, would cost without end, and have no byte that is counted.
            if size(part):
                parts.append(part)
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        low, high = self._repetition()
        if (low, high) == (1, 1):
            return node
        if self._peek() == "?":
            self._at += 1  # Whether it is greedy makes no difference to whether there is a match.
        begin = self._at
        if self._repetition() != (1, 1) or self._text[begin : begin + 1] == "+":
            self._at = begin
            self._refuse("want one repetition, and a group around what is repeated twice,")
        return Repeat(node, low, high) if size(node) else _EMPTY

    def _repetition(self) -> tuple[int, int | None]:
        """Read one; (1, 1) where there is none."""
        sign = self._peek()
        if sign and sign in "*+?":
            self._at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        found = _REPEATED.match(self._text, self._at)
        if found is None:
            return 1, 1
        low = int(found[1])
        high = low if found[2] is None else (int(found[3]) if found[3] else None)
        if max(low, high or 0) > MAX_POSITIONS or (high is not None and high < max(low, 1)):
            self._refuse(f"want 1 to {MAX_POSITIONS} repetitions, the lower number first,")
        self._at = found.end()
        return low, high

    def _atom(self) -> Node:
        begin, character = self._at, self._text[self._at]
        self._at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return Bytes(self._class())
        if character == ".":
            return Bytes(ANY)
        if character == "\\":
            return Bytes(self._fold(self._escaped()))
        if character in "*+?":
            self._at = begin
            self._refuse("want something before a repetition")
        if character in "^$":
            self._at = begin
            self._refuse(_ANCHORS)
        try:
            encoded = character.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            self._at = begin
            self._refuse("want characters of UTF-8")
        nodes = tuple(Bytes(self._fold(1 << byte)) for byte in encoded)
        return nodes[0] if len(nodes) == 1 else Chain(nodes)

    def _group(self) -> Node:
        begin = self._at - 1
        if self._text.startswith("?:", self._at):
            self._at += 2
        elif self._peek() == "?":
            self._at = begin
            self._refuse("want (...) or (?:...), and (?i) at the beginning only,")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._refuse(f"want at most {MAX_DEPTH} groups within each other")
        options = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._sequence())
        if self._peek() != ")":
            self._at = begin
            self._refuse("want a ) for this (")
        self._at += 1
        self._depth -= 1
        filled = [option for option in options if size(option)]
        if len(filled) < len(options):
            filled.append(_EMPTY)  # One of them says as much as many.
        return filled[0] if len(filled) == 1 else Either(tuple(filled))

    def _class(self) -> int:
        begin = self._at - 1
        is_negated = self._peek() == "^"
        self._at += is_negated
        mask, is_first = 0, True
        while is_first or self._peek() != "]":
            if not self._peek():
                self._at = begin
                self._refuse("want a ] for this [")
            mask |= self._item()
            is_first = False
        self._at += 1
        mask = self._fold(mask)
        return ALL & ~mask if is_negated else mask

    def _item(self) -> int:
        low, begin = self._member(), self._at
        if self._peek() != "-" or self._text[begin + 1 : begin + 2] in ("]", ""):
            return low
        self._at += 1
        high = self._member()
        if low.bit_count() != 1 or high.bit_count() != 1 or high < low:
            self._at = begin
            self._refuse("want a range from a lower to a higher character")
        return (high << 1) - low

    def _member(self) -> int:
        character = self._text[self._at]
        self._at += 1
        if character == "\\":
            return self._escaped()
        if ord(character) > 127:
            self._at -= 1
            self._refuse("want ASCII in [...]; (a|b) takes other characters,")
        return 1 << ord(character)

    def _escaped(self) -> int:
        character = self._peek()
        if character == "x" and re.match("[0-9a-fA-F]{2}", self._text[self._at + 1 : self._at + 3]):
            self._at += 3
            return 1 << int(self._text[self._at - 2 : self._at], 16)
        if character in _CLASSES and character:
            self._at += 1
            return _CLASSES[character]
        if not character or character.isalnum() or ord(character) > 127:
            self._at -= 1
            self._refuse("want \\d \\D \\w \\W \\s \\S \\t \\xHH or escaped punctuation")
        self._at += 1
        return 1 << ord(character)

    def _fold(self, mask: int) -> int:
        if not self._folds:
            return mask
        lower, upper = LETTERS >> 97 << 97, LETTERS & ~(LETTERS >> 97 << 97)
        return mask | (mask & upper) << 32 | (mask & lower) >> 32

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _refuse(self, wanted: str) -> NoReturn:
        seen = self._text[self._at : self._at + 20]
        got = f"got {seen!r} at character {self._at + 1}" if seen else "got the end of the pattern"
        raise PatternError(f"{wanted.rstrip(',')}, {got}")


def required(alternatives: Sequence[Alternative]) -> bytes:
    """Return a text that is in each line that matches, in small letters; b"": none is known.

    Whoever looks for it first, in lines of small letters, need not look at most lines otherwise.
    """
    if len(alternatives) != 1:
        return b""
    best, run = b"", bytearray()
    for node in _flat(alternatives[0].node):
        byte = _letter(node.mask) if isinstance(node, Bytes) else None
        if byte is None:
            best, run = max(best, bytes(run), key=len), bytearray()
        else:
            run.append(byte)
    return max(best, bytes(run), key=len)


def _flat(node: Node) -> list[Node]:
    """Return what must be there, one after the other; what may be missing or vary is one item."""
    if isinstance(node, Chain):
        return [item for part in node.parts for item in _flat(part)]
    if isinstance(node, Repeat) and node.low >= 1:
        return [*_flat(node.part), node]
    return [node]


def _letter(mask: int) -> int | None:
    """Return the byte, as a small letter, where it is always the same one."""
    bytes_ = {ord(chr(byte).lower()) if byte < 128 else byte for byte in range(256) if mask >> byte & 1}
    return bytes_.pop() if len(bytes_) == 1 else None
