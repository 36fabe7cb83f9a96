"""Pure: which images a job's rendezvous may have, if not any."""

from collections.abc import Iterable

NOT_ALLOWED = "is not among the rendezvous images that the operator allows"
MAX_PATTERNS = 64
MAX_SHOWN = 5
_ENDS = ("/*", ":*", "@*")


def pattern_fault(pattern: str) -> str:
    """Return what is wrong with a pattern; "" for nothing. A prefix that ends anywhere would allow other names, too."""
    is_prefix = pattern.endswith("*")
    if not pattern or "*" in pattern[: -1 if is_prefix else None] or (is_prefix and not pattern.endswith(_ENDS)):
        return f"must be an image, or a prefix that ends in {', '.join(_ENDS)}; got {pattern!r}"
    return ""


def is_allowed(image: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns is this image, or a prefix of it."""
    return any(image == item or (item.endswith("*") and image.startswith(item[:-1])) for item in patterns)


def image_violation(field: str, image: str, patterns: tuple[str, ...]) -> str:
    """Return a sentence with the field, the image and the patterns."""
    rest = len(patterns) - MAX_SHOWN
    shown = f"{', '.join(patterns[:MAX_SHOWN])}{f' and {rest} more' if rest > 0 else ''}"
    return f"{field}: {image!r} {NOT_ALLOWED} ({shown}): leave it out for the operator's own"
