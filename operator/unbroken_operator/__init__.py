"""The Kubernetes operator: API models, pure plans, and the kopf and kubernetes adapters. No torch."""
