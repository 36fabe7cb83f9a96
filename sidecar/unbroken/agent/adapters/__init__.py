"""The agent's ways to the outside: launcher and workers, rendezvous, shared memory, files, metrics.

Each turns what comes in into an event, or carries out one kind of action. No decisions: those are in `decisions`.
"""
