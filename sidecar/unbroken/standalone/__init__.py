"""The home that a wrapper brings along where it finds none: under torchrun, mpirun, srun, plain RANK and WORLD_SIZE.

`words` and `folders` are all that workers import of it. The rest runs in two kinds of process of its own: one *host*
process on each host, with the agent in it, and one *root* process in the whole job, with the rendezvous in it, on the
host of rank 0. Neither is a child of a worker. See docs/design/0004-standalone-mode.md.
"""
