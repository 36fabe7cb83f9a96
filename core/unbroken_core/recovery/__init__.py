"""How a job recovers: the ladder of rungs, the budget of each rung, and the history of what happened.

Belongs here: pure choices and counts that know no pod and no connection. Does not belong here: what to do about a
choice (`coordinator`), and which worker gets which rank (`ranks`).
"""
