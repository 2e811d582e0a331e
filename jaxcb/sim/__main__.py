"""``python -m jaxcb.sim``: runs of traces on machines that aren't here; see ``cli.py`` for the commands."""

from __future__ import annotations

import sys

from jaxcb.errors import JaxcbError
from jaxcb.sim.cli import parse
from jaxcb.sim.commands import COMMANDS, INTERRUPTED


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status. Whatever can't work is one line on stderr and status 1."""
    options = parse(arguments)
    try:
        return COMMANDS[options.command](options)
    except JaxcbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
