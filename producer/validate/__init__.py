"""Checks training files before a trainer does: their form, their ids, their tokens, and the thoughts in them."""
