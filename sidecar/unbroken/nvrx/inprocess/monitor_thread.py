"""What interrupts a wrapped function."""

from unbroken.inprocess.interruption.gate import RankShouldRestart

__all__ = ["RankShouldRestart"]
