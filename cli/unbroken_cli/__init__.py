"""What people ask of a job from the command line: `unbroken status`, `unbroken why`, `unbroken timeline`.

Here belongs what reads and words; nothing here changes a job. Reading is in `kube` and `rendezvous`, all else is pure.
"""
