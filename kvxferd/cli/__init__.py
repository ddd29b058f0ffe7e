"""The command line: one file per verb."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. What cannot be done is one line on standard error and exit code 2."""
    try:
        from kvxferd.cli.root import root

        root(prog_name="kvxferd")  # imports the verb
    except ModuleNotFoundError as error:
        # The client alone is installed: an engine's environment, say.
        sys.stderr.write(
            f"kvxferd: cannot run: {error.name} is not installed; pip install 'kvxferd[daemon]'\n"
        )
        raise SystemExit(2) from None
