"""Pure: how much a spec costs whoever reads it, by its values and characters. The walk itself is bounded."""

from typing import Any

QUICK_VALUES, QUICK_CHARACTERS = 1_000, 64 << 10
"""A plan for a spec of this size takes a few milliseconds. A template of two containers has a hundred values."""


def is_heavy(spec: Any) -> bool:
    """Return whether a spec has more values or characters than a plan reads in passing."""
    return exceeds(spec, QUICK_VALUES, QUICK_CHARACTERS)


def exceeds(spec: Any, num_values: int, num_characters: int) -> bool:
    """Return whether a JSON value holds more values or characters; looks at no more of it than the answer needs."""
    level = [spec]
    while level:
        num_values -= len(level)
        children: list[Any] = []
        for item in level:
            if isinstance(item, str):
                num_characters -= len(item)
            elif isinstance(item, dict | list):
                if len(item) + len(children) > num_values:
                    return True
                if isinstance(item, dict):
                    num_characters -= sum(map(len, item))
                children += item.values() if isinstance(item, dict) else item
            if num_characters < 0:
                return True
        level = children
    return num_values < 0


def num_characters(item: Any) -> int:
    """Return how many characters a JSON value has in its texts and keys; looks at all of it."""
    total, level = 0, [item]
    while level:
        children: list[Any] = []
        for one in level:
            if isinstance(one, str):
                total += len(one)
            elif isinstance(one, dict):
                total += sum(map(len, one))
                children += one.values()
            elif isinstance(one, list):
                children += one
        level = children
    return total
