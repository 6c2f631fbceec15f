"""Looks at the model servers before a run: cheaply before every enqueue, with real requests for `producer doctor`."""
