"""Kubernetes quantities ("500m", "2Gi", "8") as exact numbers."""

import re
from fractions import Fraction

from unbroken_core.vocabulary.errors import InputError

_SUFFIXES = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
_PATTERN = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3}))?([a-zA-Z]{0,2})")


def parse_quantity(text: object) -> Fraction:
    """Return the exact value. Raises InputError."""
    match = _PATTERN.fullmatch(str(text).strip())
    if match is None or match[3] not in _SUFFIXES or (match[2] and match[3]) or isinstance(text, bool):
        raise InputError(f'quantity: want a number with an optional suffix such as "500m", "8" or "2Gi", got {text!r}')
    return Fraction(match[1]) * Fraction(10) ** int(match[2] or 0) * _SUFFIXES[match[3]]
