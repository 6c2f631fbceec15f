"""`producer monitor`: a run as it goes, in a terminal or as plain lines."""
