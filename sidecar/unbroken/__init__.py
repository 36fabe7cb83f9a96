"""All that runs in a job's pods, and the library that users import (`from unbroken import inprocess`).

Nothing is imported here: the worker must not pay for the agent, nor the agent for torch.
"""
