"""The console script `kvbus`."""

from __future__ import annotations

import sys

from kvbus.errors import MissingExtra


def main() -> None:
    """Run the command line and end the process with its exit code (see kvbus.cli.exits)."""
    try:
        from kvbus.cli.app import run
    except ImportError as error:
        if error.name not in ("typer", "rich", "click", "shellingham"):
            raise
        missing = MissingExtra(f"the command line needs the package {error.name}")
        sys.stderr.write(f"error {missing}\n  next: pip install 'kvbus[cli]'\n")
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
