"""`python -m model_adapter.demo`: see the package."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from model_adapter.demo.picture import draw
from model_adapter.demo.present import HBM_WIDTH, WIDTH_MIN, print_report
from model_adapter.demo.run import Demo, Settings
from model_adapter.devices import device_of
from model_adapter.errors import InputError


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
    sessions: Annotated[int, typer.Option(min=1, help="Sessions at most.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns per session at most.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate per turn.")] = 8,
    tiers: Annotated[
        str, typer.Option(help="The store's: dram,ssd, or hbm,dram,ssd.")
    ] = "dram,ssd",
    hbm_device: Annotated[
        str,
        typer.Option(help="What hbm is on: simulated (host memory, no GPU), or cupy for CUDA."),
    ] = "simulated",
    device: Annotated[
        str, typer.Option(help="Where the model computes: cpu, or cuda, with --hbm-device cupy.")
    ] = "cpu",
) -> None:
    """Real agent sessions without a store, with an empty one, and with a warm one."""
    if tiers not in ("dram,ssd", "hbm,dram,ssd"):
        raise typer.BadParameter(f"--tiers {tiers!r}: the demo plays dram,ssd or hbm,dram,ssd")
    try:
        device_of(device)
    except InputError as e:
        raise typer.BadParameter(str(e)) from e
    settings = Settings(
        *(preset, seed, sessions, turns, max_tokens),
        *(hbm_device if "hbm" in tiers else None, device),
    )
    width = WIDTH_MIN + (HBM_WIDTH if settings.hbm_device else 0)
    console = Console(width=max(Console().width, width))
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"making a random checkpoint: preset {preset}, seed {seed}")
    with (
        tempfile.TemporaryDirectory(prefix="ds41f-demo-") as directory,
        _progress(console) as progress,
    ):
        results = Demo(Path(directory), settings, progress).run()
    draw(results, out / "demo.png")
    results.save(out / "demo.json")
    console.print(f"picture: {out / 'demo.png'}, numbers: {out / 'demo.json'}")
    print_report(results, console)
    raise typer.Exit(1 if results.problems else 0)


if __name__ == "__main__":
    typer.run(main)
