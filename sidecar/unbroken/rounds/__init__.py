"""Rounds of torchrun's nodes: the server, its client in each torchrun, and what starts the server.

`server` serves all runs of one `python -m unbroken.rounds`; `client` is a thread in a torchrun process. No torch, and
none of torchrun's types: `unbroken.torchrun_plugin` has those. Decisions are in `unbroken_core.torchrun_rounds.rounds`.
See docs/design/0012-rounds-for-torchrun.md.
"""
