"""What torch keeps from one iteration to the next, and how it is dropped."""
