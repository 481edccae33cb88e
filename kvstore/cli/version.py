"""`--version`."""

from importlib.metadata import version
from typing import Annotated

import typer

DISTRIBUTION = "ds41-kvstore"


def _print(wanted: bool) -> None:
    if wanted:
        print(f"{DISTRIBUTION} {version(DISTRIBUTION)}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print, is_eager=True, help="Print it, and end.")
]
