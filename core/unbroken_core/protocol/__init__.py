"""What programs send one another: the messages, a job's settings, the bounds of both, and how they are written as JSON.

Belongs here: a field that leaves its process, how large it may be, how it is read, and what the text in it means to all
who read it: `log_rules` has the language of patterns, which settings check and launchers match. Does not belong here:
what is said within a pod (`pod`), and what a coordinator makes of a message (`coordinator`).
"""
