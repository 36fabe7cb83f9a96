"""Pure: Kubernetes quantities, and the sizes of memory that a spec may ask for."""

import re
from fractions import Fraction

_UNITS = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_UNITS = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([a-zA-Z]{0,2})")
_SOUND = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?")
"""All that the API server reads as one, at any length; this operator itself calculates with less."""
_MAX_CHARACTERS = 64
"""Kubernetes itself knows no number above 2**63 - 1, and no part below 1n; longer ones no float can hold."""
_TOO_LARGE = 10**_MAX_CHARACTERS
_MIB = 1 << 20
_DIGITS = {"": (7, 15), "(Ki|k)": (4, 12), "(Mi|M)": (1, 9), "(Gi|G)": (1, 6), "(Ti|T)": (1, 3)}
"""Least and most digits of a size with each unit."""
SIZE_PATTERN = (
    "^(" + "|".join(f"[1-9][0-9]{{{least - 1},{most - 1}}}{unit}" for unit, (least, most) in _DIGITS.items()) + ")$"
)
"""What a size looks like: the one definition for schema, CEL rule, webhook and operator."""
SIZE_WANTED = "want 1M to 999Ti: bytes, or a whole number with Ki, Mi, Gi, Ti, k, M, G or T, such as 4Gi"


def quantity(text: object) -> Fraction | None:
    """Return the value of a Kubernetes quantity such as "500m" or "2Gi"; None for what is none."""
    if not isinstance(text, (str, int, float)) or (isinstance(text, int) and abs(text) >= _TOO_LARGE):
        return None
    shown = str(text)
    match = _QUANTITY.fullmatch(shown) if len(shown) <= _MAX_CHARACTERS else None
    if match is None:
        return None
    number, unit = Fraction(match[1]), match[2]
    if unit in _BINARY_UNITS:
        return number * Fraction(1024) ** (_BINARY_UNITS.index(unit) + 1)
    return number * Fraction(10) ** _UNITS[unit] if unit in _UNITS else None


def is_quantity(value: object) -> bool:
    """Return whether the API server can read this as a quantity; in time linear in its length."""
    if isinstance(value, str):
        return _SOUND.fullmatch(value.strip(" ")) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_size(value: object) -> bool:
    """Return whether this is a size of memory as a spec may have it."""
    return re.fullmatch(SIZE_PATTERN, str(value), re.ASCII) is not None


def size_bytes(value: str | int) -> int:
    """Return the bytes of what is a size."""
    return int(quantity(value) or 0)


def with_bytes(text: object, num_bytes: int) -> object:
    """Return a quantity of memory that is larger by so many bytes; what is no quantity stays for the API server."""
    before = quantity(text)
    if before is None:
        return text
    total = -int(-(before + num_bytes) // 1)
    return f"{total // _MIB}Mi" if total % _MIB == 0 else str(total)
