"""The proxy through which a browser on this machine reaches a job's live page. It knows one job, and only reads."""
