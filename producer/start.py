"""Where the command `producer` begins: nothing is loaded before Ctrl-C is heard."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it quietly even while it loads."""
    try:
        from producer.cli import main as run  # noqa: PLC0415 loading takes a third of a second

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
