"""Public benchmarks: they print how promptmill does against its targets on this machine; nothing is asserted."""
