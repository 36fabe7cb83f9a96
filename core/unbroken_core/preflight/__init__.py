"""Which hosts and links are broken, found out by pairs of hosts before a job begins.

Belongs here: who tests with whom, and what follows from it. Does not belong here: how a pair is tested.
"""
