"""The world that trained last, and what a coordinator that was not there to see it may know of it.

Belongs here: whether that world has stopped, and when and by whom it was lost. Does not belong here: who trains next.
"""
