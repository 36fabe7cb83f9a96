"""What a worker shares with its pod: environment, the link to the agent, the page of progress stamps.

Here: nothing that knows of iterations, plug-ins or torch.
"""
