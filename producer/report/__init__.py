"""`producer report`: one page about a run, made of its files alone."""
