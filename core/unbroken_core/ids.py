"""Identities. Ranks of different kinds never mix: each is a NewType of its own."""

from typing import NewType

InitialRank = NewType("InitialRank", int)
"""Rank at a worker's first plan, 0-based; never changes."""
Rank = NewType("Rank", int)
"""Rank among all living workers of an iteration, spares included, 0-based."""
ActiveRank = NewType("ActiveRank", int)
"""Rank that the training function sees, 0-based, dense."""
LocalRank = NewType("LocalRank", int)
"""Index of a worker in its pod, 0-based."""
Iteration = NewType("Iteration", int)
"""Number of a run of the training function, 0-based; -1 means before the first."""
Generation = NewType("Generation", int)
"""Fencing number of a coordinator; a higher one wins."""
