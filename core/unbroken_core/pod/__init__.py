"""The words spoken within one pod: messages between agent, launcher and workers, their page of stamps, their stacks.

Belongs here: layouts and messages that agent and workers must agree on, and pure decisions on them. Does not belong
here: what the agent and the rendezvous say to each other (`protocol.messages`).
"""
