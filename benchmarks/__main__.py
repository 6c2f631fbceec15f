"""Starts the benchmarks: `python -m benchmarks [name ...]`."""

from __future__ import annotations

from benchmarks.run import main

if __name__ == "__main__":
    main()
