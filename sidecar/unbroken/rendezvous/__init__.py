"""The service of a job: the shell around the coordinator, with its WebSocket and HTTP API. No torch.

`door`, `token`, `limits`, `refusals`, `reading` and `peer` know nothing of jobs: rounds for torchrun have them, too.
"""
