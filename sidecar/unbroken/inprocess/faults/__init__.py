"""What a worker does to itself when it is told to, in a job that allows faults; nothing here is imported in others.

Standard library only. What is broken is broken for real: the job is to find the cause as it would find any other.
"""
