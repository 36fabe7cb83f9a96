"""Processes that never outlive their owner: each under a reaper of its own, which ends all of its descendants.

Nothing here knows Kubernetes. `zygote` is a script that starts without the owner's modules, so that a fork of it is
small and quick; `host` is the owner's asyncio side.
"""
