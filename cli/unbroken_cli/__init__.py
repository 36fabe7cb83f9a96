"""What people ask of a job from the command line: `unbroken status`, `why`, `timeline`, `topology` and `inject`.

Only `inject` changes a job. `sources` and `page_proxy` read, `commands` parse options and print; all else is pure.
"""
