"""Rounds of torchrun's nodes, over the network: what serves them, what takes part in them, and what starts the former.

No torch here, and nothing of torchrun's words: `unbroken.torchrun_plugin` has those. `server` serves all runs of one
`python -m unbroken.rounds`, behind the same door as a job's rendezvous, which serves none. `client` is a thread in a
torchrun process. What is decided is decided in `unbroken_core.torchrun_rounds.rounds`.
See docs/design/0012-rounds-for-torchrun.md.
"""
