"""The command line. Read `root` first: its table has every verb, by group, with the module that it is in.

`listing`, `history`, `status` and `top` show what a running daemon has, `operate` changes it, and `doctor`
finds what is wrong. `options` has what several verbs take.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. An error prints one line on standard error, and the exit code is 2."""
    try:
        from kvxferd.cli.root import root
    except ModuleNotFoundError as error:
        # The client alone is installed: an engine's environment, say.
        sys.stderr.write(f"kvxferd: {not_installed_message(error.name)}\n")
        raise SystemExit(2) from None
    from kvxferd.errors import KvxferdError

    try:
        root(prog_name="kvxferd")
    except KvxferdError as error:  # outside of any verb
        sys.stderr.write(f"kvxferd: {error.message}\n")
        raise SystemExit(2) from None


def not_installed_message(module: str | None) -> str:
    """Return the message for a verb of which a module is not installed."""
    return f"cannot run: {module} is not installed; pip install 'kvxferd[daemon]'"
