"""How workers without a pod start, and find, their own agent and rendezvous."""
