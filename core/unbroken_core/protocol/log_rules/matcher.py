"""Whether a line matches a pattern: an automaton, whose states are made when they are first needed.

A pattern's bytes are numbered (Glushkov). A state is the set of those that may have been the last one, as bits of one
int, so a step is two operations on ints of at most MAX_POSITIONS bits. Nothing goes back: the time is at most
proportional to the length of the line, whatever pattern and line are. States that were made are kept, up to a limit.
"""

from typing import Final

from unbroken_core.protocol.log_rules.syntax import Bytes, Chain, Either, Node, Repeat, parse, required

MAX_CELLS: Final = 4096
"""Steps that are kept for one pattern: some 300 kB."""


class _Row(dict[int, "_Row"]):
    """One state: the next one, by byte."""

    __slots__ = ("is_end", "reach")

    def __init__(self, reach: int, is_end: bool) -> None:
        super().__init__()
        self.reach = reach
        """Positions that the next byte may be at."""
        self.is_end = is_end
        """Whether a line that ends here matches."""


class Matcher:
    """One pattern."""

    def __init__(self, pattern: str) -> None:
        """Raises PatternError."""
        alternatives = parse(pattern)
        self.required = required(alternatives)
        """In each line that matches, once its letters are small; b"": not known."""
        self._follow: list[int] = []
        """By position, those that may come next."""
        self._at_byte = [0] * 256
        """By byte, the positions that take it."""
        self._anywhere = self._found = self._found_at_end = 0
        """Positions that a match may begin with anywhere; those that end one; those that end one at the line's end."""
        first, is_empty_end, self._is_trivial = 0, False, False
        for each in alternatives:
            is_nullable, begins, ends = self._build(each.node)
            first |= begins
            if not each.is_at_start:
                self._anywhere |= begins
            if each.is_at_end:
                self._found_at_end |= ends
            else:
                self._found |= ends
            is_empty_end = is_empty_end or is_nullable
            # The empty text is in each line, except as a whole line.
            self._is_trivial = self._is_trivial or (is_nullable and not (each.is_at_start and each.is_at_end))
        self._start = _Row(first, is_empty_end)
        self._match = _Row(0, True)
        self._rows: dict[int, _Row] = {}
        self._num_cells = 0

    def matches(self, line: bytes) -> bool:
        """Return whether the pattern is in the line, which has no line end."""
        if self._is_trivial:
            return True
        row, match = self._start, self._match
        for byte in line:
            try:
                row = row[byte]
            except KeyError:
                row = self._step(row, byte)
            if row is match:
                return True
        return row.is_end

    def _step(self, row: _Row, byte: int) -> _Row:
        """Make the state after this byte, and keep it."""
        state = row.reach & self._at_byte[byte]
        if state & self._found:
            following = self._match
        else:
            known = self._rows.get(state)
            following = known if known is not None else self._make(state)
        if self._num_cells >= MAX_CELLS:
            # All that was kept goes; rows in use are made again when they are met.
            self._rows.clear()
            self._start = _Row(self._start.reach, self._start.is_end)
            self._num_cells = 0
            return self._make(state) if following is not self._match else following
        self._num_cells += 1
        row[byte] = following
        return following

    def _make(self, state: int) -> _Row:
        reach, rest = self._anywhere, state
        while rest:
            lowest = rest & -rest
            reach |= self._follow[lowest.bit_length() - 1]
            rest ^= lowest
        made = self._rows[state] = _Row(reach, bool(state & self._found_at_end))
        return made

    def _build(self, node: Node) -> tuple[bool, int, int]:
        """Number the bytes of a part; return whether it may be empty, and its first and last positions."""
        match node:
            case Bytes(mask=mask):
                bit = 1 << len(self._follow)
                self._follow.append(0)
                for byte in range(256):
                    if mask >> byte & 1:
                        self._at_byte[byte] |= bit
                return False, bit, bit
            case Chain(parts=parts):
                return self._chain([self._build(part) for part in parts])
            case Either(options=options):
                built = [self._build(option) for option in options]
                first = last = 0
                for _nullable, begins, ends in built:
                    first, last = first | begins, last | ends
                return any(is_nullable for is_nullable, _first, _last in built), first, last
            case Repeat(part=part, low=low, high=high):
                return self._repeat(part, low, high)

    def _repeat(self, part: Node, low: int, high: int | None) -> tuple[bool, int, int]:
        built = [self._build(part) for _ in range(max(low if high is None else high, 1))]
        if high is None:
            is_nullable, first, last = built[-1]
            self._connect(last, first)
            built[-1] = (is_nullable or low == 0, first, last)
        else:
            built[low:] = [(True, first, last) for _nullable, first, last in built[low:]]
        return self._chain(built)

    def _chain(self, parts: list[tuple[bool, int, int]]) -> tuple[bool, int, int]:
        whole: tuple[bool, int, int] = (True, 0, 0)
        for is_nullable, first, last in parts:
            may_be_empty, begins, ends = whole
            self._connect(ends, first)
            begins |= first if may_be_empty else 0
            whole = may_be_empty and is_nullable, begins, last | (ends if is_nullable else 0)
        return whole

    def _connect(self, ends: int, begins: int) -> None:
        while ends:
            lowest = ends & -ends
            self._follow[lowest.bit_length() - 1] |= begins
            ends ^= lowest
