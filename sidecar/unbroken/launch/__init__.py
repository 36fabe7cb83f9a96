"""The launcher: process 1 of the trainer container and parent of its workers. Standard library and core only.

It obeys the agent and decides nothing: what to start or end is the agent's word.
"""
