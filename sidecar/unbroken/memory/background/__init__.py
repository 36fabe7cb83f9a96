"""Ordinary checkpoints on the disk, made out of those in memory while the training goes on.

Here belongs what the worker hands over, the process that writes, and the folder in which the ranks' processes meet.
What is saved in memory, and what is restored, is decided elsewhere.

    worker ──slot, locked──> process of this rank ──parts──> FOLDER/.unbroken/… ──rename──> FOLDER/step-100
"""
