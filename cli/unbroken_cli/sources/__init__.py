"""Where facts about a job are read: the API server, the rendezvous."""
