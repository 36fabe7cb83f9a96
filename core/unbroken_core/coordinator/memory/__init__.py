"""Checkpoints in memory, as the coordinator knows them: who holds what, and what a plan restores.

Belongs here: the table of shards, which its callers keep up to date, and the choice among what it offers. Does not
belong here: phases, connections, and anything else of a job.
"""
