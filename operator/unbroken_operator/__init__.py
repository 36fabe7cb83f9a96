"""The Kubernetes operator. No torch.

__main__, handlers, jobs, worker   the shell: process, kopf, one task a job
adapters                           input and output
decisions                          pure: from a snapshot to a plan
api                                the CRD's models and the names of a job's objects
"""
