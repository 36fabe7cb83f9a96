"""Sockets and stores of one iteration.

Here: the address that a worker offers, how it reaches the store, and how blocked connections are cut. Process groups
are in `torch_state`, the connection to the agent is in `pod`.
"""
