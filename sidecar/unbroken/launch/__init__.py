"""The launcher: process 1 of the trainer container and parent of its workers. Standard library and core only.

Here: starting, ending and reaping processes, their output and error files. No decisions: the agent says what to start
and what to end. `fork_server` runs in the user's interpreter, with the standard library alone.
"""
