"""What the coordinator knows, as values: pods and their places, the world in force, the phase, the numbers.

Belongs here: values, and the verbs of the one table that is changed in place (`members`). Does not belong here: any
decision, and anything that sends a message.
"""
