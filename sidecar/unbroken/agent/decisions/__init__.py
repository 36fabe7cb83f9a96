"""What the agent decides about its pod: pure, no input or output."""
