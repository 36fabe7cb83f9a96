"""What the worker shares with its pod: environment, link to the agent, progress stamps."""
