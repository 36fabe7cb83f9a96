"""What users and programs see of a job in the API server: models and their schema. No decisions."""
