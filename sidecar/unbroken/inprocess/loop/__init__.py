"""One call of a wrapped function: the loop of iterations, and the plug-ins around the function.

Here: what happens when, in the main thread. How a function is interrupted, a group aborted or the agent reached is in
the folders beside this one.
"""
