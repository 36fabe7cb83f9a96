"""Checkpoints in memory, as the coordinator knows them: who holds what, and what a plan restores.

Nothing here knows a job: the table is told of pods and ranks, and the choice is a function of what it offers.
"""
