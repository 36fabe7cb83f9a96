"""The loop of iterations, and the plug-ins around the function."""
