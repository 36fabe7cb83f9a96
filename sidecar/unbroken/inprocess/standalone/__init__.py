"""Where a wrapped call runs: in a pod, or in standalone mode, where workers start agent and rendezvous themselves.

Here: the worker's side, with the standard library alone. The processes that it starts are in `unbroken.standalone`.
"""
