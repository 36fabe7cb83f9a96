"""Rank assignment as callables on a ctx, for scripts of the reference.

In a job the coordinator assigns ranks; these give the same answers for a ctx of one's own. Each step changes the ctx
that it is given and returns it. `Compose(c, b, a)` runs a, then b, then c: renumbering steps stand to the right of
filters. A user's own policy is a subclass of RankAssignment or RankFilter.
"""

from unbroken.inprocess.assignment.steps import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    RankFilter,
    ShiftRanks,
)
from unbroken.inprocess.assignment.tree import Layer, LayerFlag, RootKeyMismatch, Tree

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "FillGaps",
    "FilterCountGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "RootKeyMismatch",
    "ShiftRanks",
    "Tree",
]

for _name in __all__:
    # Messages, logs and pickles name what scripts import.
    globals()[_name].__module__ = __name__
