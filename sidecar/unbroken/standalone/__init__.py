"""Standalone mode: agent and rendezvous that wrappers start themselves, under torchrun, mpirun, srun or plain RANK.

Here: two kinds of process, neither a child of a worker. One *host* process on each host holds the agent; one *root*
process in the job, on rank 0's host, holds the rendezvous. Workers import only `messages`; their side is
`unbroken.inprocess.standalone`. See docs/design/0004-standalone-mode.md.
"""
