"""Sockets, files, shared memory and metrics of the agent. No decisions."""
