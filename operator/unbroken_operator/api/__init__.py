"""What users and programs see of a job in the API server: the CRD's models, its schema and reference, and names.

No decisions, and nothing that talks to anybody.
"""
