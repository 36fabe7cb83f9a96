"""What becomes of findings of the pods' watches.

Belongs here: noting them, and when a pod loses its ranks for them. Does not belong here: what a finding says
(`vocabulary.findings`), how it is found (`unbroken.watch`), and where the ranks go (`ranks`).
"""
