"""`python -m model_adapter.demo`: see the package."""

import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import kvstore
from model_adapter.demo.conversations import load_conversations
from model_adapter.demo.daemon import Daemon
from model_adapter.demo.picture import draw
from model_adapter.demo.play import Played, play_checked, play_plain
from model_adapter.demo.present import WIDTH_MIN, print_report
from model_adapter.demo.reference import ProcessBlocks
from model_adapter.demo.results import DemoResults
from model_adapter.demo.schedule import schedule
from model_adapter.make_checkpoint import make_checkpoint
from model_adapter.model import Model
from model_adapter.session import CachedSession, StoreBlocks, namespace_of
from model_adapter.tokenizer import load_tokenizer

DRAM_BYTES = 64 << 20
SSD_BYTES = 1 << 30
WARM_UP_TOKENS = 300
DEADLINE_S = 10.0


class Demo:
    """The three passes. `directory`: for the checkpoint, the store and the daemon's socket."""

    def __init__(
        self,
        directory: Path,
        preset: str,
        seed: int,
        turns_max: int,
        max_tokens: int,
        progress: Progress,
    ) -> None:
        self._start = time.perf_counter()
        self._directory = directory
        self._preset = preset
        self._max_tokens = max_tokens
        self._progress = progress
        self._checkpoint = directory / "checkpoint"
        make_checkpoint(preset, seed, self._checkpoint)
        self._model = Model.load(self._checkpoint, dtype=torch.float32)
        tokenizer = load_tokenizer(self._checkpoint)
        self._turns = schedule(load_conversations(), tokenizer, turns_max)
        self._namespace = namespace_of(self._model, self._checkpoint)

    def run(self) -> DemoResults:
        """Play all three passes; the daemon is stopped and started again before the last."""
        self._warm_up()
        plain = self._plain()
        reference = ProcessBlocks(self._namespace.layout)
        empty, _ = self._stored("2/3 empty store", reference)
        warm, lookups = self._stored("3/3 warm store, daemon restarted", reference)
        return DemoResults(
            preset=self._preset,
            layout=self._namespace.layout,
            plain=plain,
            empty=empty,
            warm=warm,
            lookup_blocks=lookups,
            seconds=time.perf_counter() - self._start,
        )

    def _warm_up(self) -> None:
        """Weights are read at first use; that is not to be the first turn's cost."""
        ids = self._turns[0].prompt_ids[:WARM_UP_TOKENS]
        CachedSession(self._model).generate(ids, 2)

    def _plain(self) -> list[Played]:
        task = self._progress.add_task("1/3 no store", total=len(self._turns))
        return play_plain(
            self._model, self._turns, self._max_tokens, lambda: self._progress.advance(task)
        )

    def _stored(self, name: str, reference: ProcessBlocks) -> tuple[list[Played], dict[str, int]]:
        task = self._progress.add_task(name, total=len(self._turns))
        with (
            Daemon(self._directory, DRAM_BYTES, SSD_BYTES) as daemon,
            kvstore.connect(daemon.url, deadline_s=DEADLINE_S) as client,
        ):
            played = play_checked(
                self._model,
                self._turns,
                self._max_tokens,
                StoreBlocks(client, self._namespace),
                reference,
                lambda: self._progress.advance(task),
            )
            client.flush()
            return played, client.stat().lookup_blocks


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<34}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
        console=console,
    )


def main(
    out: Annotated[Path, typer.Option(help="Where the picture and the numbers go.")] = Path(
        "out/demo"
    ),
    preset: Annotated[str, typer.Option(help="Sizes of the random checkpoint.")] = "small",
    seed: Annotated[int, typer.Option(help="Of the checkpoint.")] = 0,
    turns: Annotated[int, typer.Option(min=1, help="Turns per session at most.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per turn.")] = 8,
) -> None:
    """Real agent sessions without a store, with an empty one, and with a warm one."""
    detected = Console()
    console = Console(width=max(detected.width, WIDTH_MIN))
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="ds41f-demo-") as directory,
        _progress(console) as progress,
    ):
        results = Demo(Path(directory), preset, seed, turns, max_tokens, progress).run()
    draw(results, out / "demo.png")
    results.save(out / "demo.json")
    console.print(f"picture: {out / 'demo.png'}, numbers: {out / 'demo.json'}")
    print_report(results, console)
    raise typer.Exit(1 if results.problems else 0)


if __name__ == "__main__":
    typer.run(main)
