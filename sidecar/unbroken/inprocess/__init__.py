"""The restart loop inside the user's training process. Standard library, torch and core only."""
