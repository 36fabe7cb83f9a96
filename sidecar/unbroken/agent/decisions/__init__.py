"""What the agent decides about its pod, as pure functions of events and time.

Here: events and actions, what is known of each worker, and what follows from it. No clock, no socket, no file, no log:
`adapters` and the shell have those, and pass time in as `now_s`.
"""
