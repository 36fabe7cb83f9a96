"""Who is which active rank: the rules of a job, its tree of domains, and the next world of ranks.

Belongs here: all that depends on pods and their health alone. Does not belong here: why a pod is unhealthy, messages,
processes, time. `tree` knows nothing of a job; inprocess uses it, too.
"""
