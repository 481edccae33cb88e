"""The commands, and how their errors reach the terminal."""

import sys

import typer

from kvstore.bench.replay import replay
from kvstore.cli import inspect, serve
from kvstore.cli.version import VersionOption
from kvstore.errors import KVStoreError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
# plain help: the other kind breaks lines where the docstrings do, and again at the terminal's edge
_PLAIN = {"pretty_exceptions_enable": False, "add_completion": False, "rich_markup_mode": None}
_SETTINGS = {"no_args_is_help": True, **_PLAIN}

app = typer.Typer(help="A tiered KV-cache store: serve it, look into it, check it.", **_SETTINGS)  # type: ignore[arg-type]


@app.callback()
def _any_command(version: VersionOption = False) -> None:
    pass


app.command("serve")(serve.serve)
app.command("stat")(inspect.stat)
app.command("ls")(inspect.ls)
app.command("verify")(inspect.verify)
app.command("evict")(inspect.evict)

bench_app = typer.Typer(help="Measure: what a cache would hit.", **_SETTINGS)  # type: ignore[arg-type]
bench_app.command("replay")(replay)
app.add_typer(bench_app, name="bench")

serve_app = typer.Typer(**_PLAIN)  # type: ignore[arg-type]
serve_app.command("kvstored")(serve.serve)


def _run(command: typer.Typer, name: str) -> None:
    try:
        command(prog_name=name)
    except KVStoreError as e:
        print(f"{name}: {type(e).__name__}: {e}", file=sys.stderr)
        raise SystemExit(EXIT_ERROR) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


def main() -> None:
    """`kvstore`."""
    _run(app, "kvstore")


def serve_main() -> None:
    """`kvstored`."""
    _run(serve_app, "kvstored")
