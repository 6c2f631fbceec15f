"""A run of the whole product under random faults: `python -m tests.chaos --seconds 600 --seed 7`."""
