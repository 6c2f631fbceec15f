"""What the tests are built on: a fake model server, a real Redis, true subprocesses."""
