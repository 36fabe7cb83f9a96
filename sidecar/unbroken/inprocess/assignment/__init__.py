"""Who is which rank, as far as the script has a say.

Here: the steps that `rank_assignment` offers, what a wrapper asks of the coordinator, and the answer of a policy in
Python. Deciding about ranks is the coordinator's, in core.
"""
