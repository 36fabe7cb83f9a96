"""The service of a job: it runs the coordinator. No torch.

Here: WebSocket and HTTP API, live page, metrics. No decisions about ranks or restarts: those are the coordinator's, in
core. What any server needs is in `unbroken.network`.
"""
