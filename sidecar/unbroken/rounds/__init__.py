"""Rounds of torchrun's nodes, over the network: what serves them, what takes part in them, and what starts the former.

No torch here, and nothing of torchrun's words: `unbroken.torchrun_plugin` has those. `server` serves all runs of one
rendezvous, also beside a job's coordinator; `python -m unbroken.rounds` serves nothing else. `client` is a thread in a
torchrun process. What is decided is decided in `unbroken_core.rounds`. See docs/design/0012-rounds-for-torchrun.md.
"""
