"""What torch keeps from one iteration to the next, and how it is dropped.

Here: process groups, stores, records of collectives. No sockets (`connections`), no decisions about when (`loop`).
"""
