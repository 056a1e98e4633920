"""Entry point of the `epilora` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the `epilora` command with the process's arguments.

    Raises
    ------
    SystemExit
        Always, with the command's exit code; with a message where the `cli` extra is not installed.
    """
    try:
        from torch_epilora.cli.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"epilora: {error.name} is not installed; the command needs the extra cli: "
            "run `pip install '.[cli]'` in the checkout"
        )
    app()


if __name__ == "__main__":
    main()
