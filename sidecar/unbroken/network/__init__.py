"""What every server and client of ours needs, whatever it carries.

Here: addresses, certificates, tokens, limits and refusals, frames, exposition of metrics. Nothing that knows of jobs,
plans or rounds: rendezvous, agent and rounds have those.
"""
