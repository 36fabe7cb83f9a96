"""The words and small values that every program uses: reasons, errors, layers, names, checkpoints, findings.

Belongs here: an enum, a name's rule, a value without behaviour that several folders use. Does not belong here:
anything that decides (`recovery`, `ranks`), and whole messages (`protocol`).
"""
