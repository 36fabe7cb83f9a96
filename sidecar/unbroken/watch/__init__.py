"""Looks after GPUs, links, storage and the node of one pod: `python -m unbroken.watch`, started by the launcher.

It runs where the devices are, in the trainer's container, so it uses the standard library only. Each check has two
functions: `sample` reads, `judge` decides and reads nothing. What a driver or a mount makes wait, makes nothing else
wait: each lane of checks is a thread of its own. Nothing here decides what becomes of a job: findings go to the agent.
"""
