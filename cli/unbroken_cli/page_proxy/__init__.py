"""The browser's way to a job's live page."""
