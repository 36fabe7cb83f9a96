"""What the operator refuses of a job, or holds back: the words of one metric."""

from enum import Enum


class Refusal(str, Enum):
    """One kind of it."""

    REPORT = "report"
    """A report of the rendezvous that is too large, or out of bounds."""
