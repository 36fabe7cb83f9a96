"""Input and output: the API server, the rendezvous, the webhook, metrics and logs; errors of libraries become ours.

What to do is decided elsewhere: a job's actions come from `decisions`, and here they are carried out.
"""
