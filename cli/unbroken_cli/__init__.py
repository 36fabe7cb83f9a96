"""What people ask of a job from the command line: `unbroken status`, `why`, `timeline`, `topology` and `inject`.

Here belongs what reads and words; only `inject` changes a job. Reading is in `kube` and `rendezvous`, what the commands
do in the module of each, all else is pure.
"""
