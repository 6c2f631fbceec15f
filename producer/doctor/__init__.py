"""What would waste a run, found before its first request: the machine, Redis, the model servers, and real answers."""
