"""Faults on purpose, in a pod that allows them: `unbroken inject` runs `python -m unbroken.faults` in the trainer.

What is here runs in the user's image: standard library only. It listens to no network: an order comes from who may
exec into the container, and reaches a worker at a socket that only that user may use. What a worker then does to itself
is in unbroken.inprocess.faults.
"""
