"""Rounds of torchrun: who is in the next one, when it begins, and what nodes and rendezvous say to each other.

Belongs here: the pure part of `torchrun --rdzv-backend=unbroken`. Does not belong here: anything of a job with agents;
that is the coordinator's.
"""
