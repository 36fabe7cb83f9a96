"""What people ask of a job: `unbroken status`, `why`, `timeline`, `topology`, `page` and `size`; `inject` breaks it.

Only `inject` changes a job. `sources`, `fetching` and `page_proxy` read, `commands` parse options and print; all else
is pure. Only `sizing` needs numpy.
"""
