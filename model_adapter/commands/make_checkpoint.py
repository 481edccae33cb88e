"""`ds41f make-checkpoint`."""

from pathlib import Path
from typing import Annotated

import typer

from model_adapter.presets import PRESETS


def make_checkpoint(
    directory: Annotated[
        Path, typer.Argument(help="Where to write it; must not hold a checkpoint.")
    ],
    preset: Annotated[str, typer.Option(help=f"Sizes: {', '.join(PRESETS)}.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
) -> None:
    """Write a random checkpoint in the released layout, with a byte-level tokenizer."""
    from model_adapter.make_checkpoint import make_checkpoint as make

    made = make(preset, seed, directory)
    typer.echo(
        f"{directory}: preset {preset}, seed {seed}, {made.parameters:,} parameters, "
        f"{made.tensor_bytes / 1e6:.1f} MB in {made.shards} files"
    )
