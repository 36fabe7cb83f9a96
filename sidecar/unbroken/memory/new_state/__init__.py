"""What the state of a new process lacks, so that a checkpoint can be loaded into it: no more than a place for it.

Which checkpoint that is, and how it is read, belongs elsewhere.
"""
