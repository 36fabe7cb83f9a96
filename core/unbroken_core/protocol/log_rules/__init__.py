"""Rules on the lines that workers print: what a job may ask for, and what a pattern matches, in linear time. Pure.

Not here: who reads the lines (`unbroken.launch.line_rules`), and what becomes of a match (the agent, the coordinator).
"""
