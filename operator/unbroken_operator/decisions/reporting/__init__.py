"""What the job's status, conditions and Events say."""
