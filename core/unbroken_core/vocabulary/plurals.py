"""Numbers in sentences for people: one pod is ready, two pods are."""


def counted(number: int, singular: str, plural: str = "") -> str:
    """Return a number and what follows it; `plural` where that is not the same with an s ("pod is", "pods are")."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def agreed(number: int, singular: str, plural: str) -> str:
    """Return the word that goes with this number, such as a verb."""
    return singular if number == 1 else plural
