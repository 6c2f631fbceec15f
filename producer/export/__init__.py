"""Training files out of a dataset's accepted records: one small writer per format behind one interface."""
