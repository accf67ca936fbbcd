"""The command `regard`: it starts before anything slow is imported, so that Ctrl-C ends it quietly at any time."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Import the command line, and run it."""
    try:
        from regard.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
