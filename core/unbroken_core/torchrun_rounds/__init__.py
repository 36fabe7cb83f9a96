"""Rounds for torchrun: who takes part in the next one. Knows nothing of a job's coordinator."""
