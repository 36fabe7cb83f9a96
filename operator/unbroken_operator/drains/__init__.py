"""A drain plugin of NVSentinel: ranks leave a node before its pods are evicted. A program of its own, `python -m`.

What belongs here: what a DrainRequest is, what is due for it, and the loop that does it. Jobs are the operator's alone:
this program asks a pod to leave by an annotation, as a person would, and writes to no job.
"""
