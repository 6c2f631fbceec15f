"""Runs Celery's command line on this installation's packages, whatever packages of their names the folder holds.

Celery puts the working folder first on its import path unless it is there already: a person's own `app.py` would
otherwise be taken for this one. Start it with `python -P`, which keeps the folder out at first.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from celery.__main__ import main

    from producer.log_rotation import keep_own_output_small

    keep_own_output_small()
    sys.path.append(str(Path.cwd()))
    sys.argv = ["celery", "-A", "app", *sys.argv[1:]]
    main()
