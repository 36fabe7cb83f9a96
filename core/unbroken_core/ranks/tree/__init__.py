"""Rank assignment on a tree of domains: who is which active rank after any loss, return or move.

Belongs here: the tree, the choice of spares, the closing of gaps, the world's size, the plan with its reasons, its
sentences and its picture as text. Does not belong here: processes, messages, stores, time, drawings.

    RankTree            built once; takes losses, returns, new places and moves in O(changed + depth)
      .plan() -> Plan   cuts the next plan: vacate -> replace -> backfill -> shift -> world size

Every step is a pure function of the tree's state. There is no randomness, and nothing depends on hashes.
"""

from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.ranks.tree.explanation import explain
from unbroken_core.ranks.tree.picture import picture
from unbroken_core.ranks.tree.places import Misplaced, Place, misplaced_names, nesting_violations
from unbroken_core.ranks.tree.plan import RankChange, TreePlan
from unbroken_core.ranks.tree.tree import RankTree

__all__ = [
    "Domain",
    "Misplaced",
    "Place",
    "RankChange",
    "RankTree",
    "TreePlan",
    "explain",
    "misplaced_names",
    "nesting_violations",
    "picture",
]
