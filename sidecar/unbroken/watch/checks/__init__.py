"""The checks that are built in, and probes: what each samples, and how it judges that.

Does not belong here: when and in which thread a check runs (`lane`, `watch`), the driver itself (`nvml`), and what
becomes of a finding.
"""
