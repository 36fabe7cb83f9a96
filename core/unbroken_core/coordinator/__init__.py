"""Every decision about a running job: a pure state machine. Events and the time come in, actions go out.

Belongs here: what the coordinator knows (`state`), one module for each phase that decides what comes next, and what a
decision does to the state (`resolver`). Does not belong here: sockets, clocks, threads, the messages themselves
(`protocol`), the assignment of ranks (`ranks`), and the choice of a rung (`recovery`).
"""
