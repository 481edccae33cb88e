"""`ds41f generate`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from model_adapter.chat.tokens import IMAGE


class Mode(StrEnum):
    """What a prefill computes (ds41f §5)."""

    BOUNDED = "bounded"
    EXACT = "exact"


class Dtype(StrEnum):
    """What the model computes in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


Device = Annotated[
    str, typer.Option("--device", help="Where the model computes: cpu, cuda or cuda:N.")
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        help=f"A picture in the place of the prompt's next {IMAGE}; repeatable.",
    ),
]


def generate(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint directory.")],
    prompt_file: Annotated[Path, typer.Option(help="UTF-8 text of the prompt.")],
    image: Images = None,
    store: Annotated[
        str | None,
        typer.Option(
            envvar="KVSTORE_URL",
            help="file:///dir, unix:///socket or dns:///host:port; none without.",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    mode: Annotated[Mode, typer.Option(help="What a prefill computes.")] = Mode.BOUNDED,
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = Dtype.FLOAT32,
    snapshots: Annotated[
        bool, typer.Option(help="Go on from window snapshots, and leave them; else replay.")
    ] = True,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 256,
    deadline_s: Annotated[float, typer.Option(help="Longest wait for the store.")] = 10.0,
    weight_cache: Annotated[
        str, typer.Option(help="Most memory for dequantised weights, such as 512MiB.")
    ] = "4GiB",
    device: Device = "cpu",
) -> None:
    """Generate greedily, taking the prompt's prefix from the store and leaving new blocks there."""
    from model_adapter.commands import run_generate
    from model_adapter.commands.prompt_files import PromptFiles

    run_generate.run(
        checkpoint,
        PromptFiles(prompt_file, image or ()),
        store,
        max_tokens,
        mode.value,
        dtype.value,
        snapshots,
        block_tokens,
        deadline_s,
        weight_cache,
        device,
    )
