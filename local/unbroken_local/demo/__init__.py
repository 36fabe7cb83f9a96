"""The demonstration: a cluster on this machine, one job, six faults, and what became of them.

    snapshot <- faults, render, verdict (pure)    <-    story, cluster    <-    driver    <-    __main__

Here belongs what shows and breaks a job from the outside, as an administrator would: through the API server, the
rendezvous' API, signals and files. Nothing here decides anything about a job.
"""
