"""How a running function is ended, and what is kept of the reason.

Here: the thread that frees a blocked main thread, the way out of the user's code, stacks and exceptions. What torch
holds on to is dropped in `torch_state`; when to interrupt is decided in `loop`.
"""
