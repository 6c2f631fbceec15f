"""What the tests are built on: a real Redis, true subprocesses, real and simulated model servers."""
