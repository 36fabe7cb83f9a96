"""What a job is worth: `unbroken size` predicts where its time will go, and how many spares pay.

    reading -> scenario -> faults, placement, checkpoints -> simulation -> study -> answer, picture

Belongs here: the model and its formulas. Does not belong here: options, files, clusters. Needs numpy.
"""
