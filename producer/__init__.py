"""The producer: fills the queue and reads the results."""
