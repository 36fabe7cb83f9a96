"""The keeper: a pod's process that owns the memory in which workers leave checkpoints. Standard library only.

It allocates slots, digests what was sealed, and says what can be restored. Workers copy into the slots themselves, so
no checkpoint ever waits for a keeper. Whatever it knows lies in the files: it may be killed at any moment.
"""
