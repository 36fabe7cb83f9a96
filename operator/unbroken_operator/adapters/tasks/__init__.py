"""How the operator's tasks run: beside each other, so that none starves another, and never ending in silence.

What the tasks do belongs elsewhere.
"""
