"""`ds41f`: the adapter's command line. A command loads torch only when it runs."""

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from model_adapter.commands.check_golden import check_golden
from model_adapter.commands.estimate import estimate
from model_adapter.commands.generate import generate
from model_adapter.commands.handover import decode, prefill
from model_adapter.commands.make_checkpoint import make_checkpoint
from model_adapter.commands.serve import serve

app = typer.Typer(
    help="DeepSeek-V4.1-Flash on its own caches, kept in a kvstore.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # the other kind breaks lines where the docstrings do, and again at the terminal's edge
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ds41-kvstore {version('ds41-kvstore')}")
        raise typer.Exit


@app.callback()
def _any_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print it, and end."
        ),
    ] = False,
) -> None:
    pass


for command in (generate, serve, prefill, decode, make_checkpoint, check_golden, estimate):
    app.command()(command)


def main() -> None:
    """Entry point of `ds41f`. An error that the caller can mend is one line and exit status 2."""
    from kvstore.errors import KVStoreError
    from model_adapter.errors import AdapterError

    try:
        app()
    except (AdapterError, KVStoreError) as e:
        print(f"ds41f: {e}", file=sys.stderr)
        sys.exit(getattr(e, "exit_status", 2))


if __name__ == "__main__":
    main()
