"""`ds41f serve`."""

from pathlib import Path
from typing import Annotated

import typer

from model_adapter.commands.generate import Device, Dtype, Mode


def serve(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint directory.")],
    store: Annotated[
        str | None,
        typer.Option(
            envvar="KVSTORE_URL",
            help="file:///dir, unix:///socket or dns:///host:port; none without.",
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="host:port; port 0 takes a free one.")
    ] = "127.0.0.1:8041",
    allow_remote: Annotated[
        bool, typer.Option(help="Listen on an address that other machines reach.")
    ] = False,
    model_name: Annotated[
        str | None, typer.Option(help="What requests call the model; the config's type without.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="What a prefill computes.")] = Mode.BOUNDED,
    dtype: Annotated[Dtype, typer.Option(help="What the model computes in.")] = Dtype.FLOAT32,
    speculate: Annotated[
        bool,
        typer.Option(help="Decode with the draft layers; the tokens are the same."),
    ] = False,
    snapshots: Annotated[
        bool, typer.Option(help="Go on from window snapshots, and leave them; else replay.")
    ] = True,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 256,
    deadline_s: Annotated[float, typer.Option(help="Longest wait for the store.")] = 10.0,
    weight_cache: Annotated[
        str, typer.Option(help="Most memory for dequantised weights, such as 512MiB.")
    ] = "4GiB",
    device: Device = "cpu",
    requests_max: Annotated[
        int, typer.Option(min=1, help="Requests at a time, waiting ones included.")
    ] = 16,
    answer_tokens_default: Annotated[
        int, typer.Option(min=1, help="Tokens of a chat answer that sets no limit.")
    ] = 4096,
) -> None:
    """Answer OpenAI's API: completions and chat completions, their prefixes kept in the store."""
    from model_adapter.commands import run_serve
    from model_adapter.serve.limits import ServeLimits

    run_serve.run(
        run_serve.ServeOptions(
            checkpoint=checkpoint,
            store=store,
            listen=listen,
            allow_remote=allow_remote,
            model_name=model_name,
            mode=mode.value,
            dtype=dtype.value,
            speculate=speculate,
            snapshots=snapshots,
            block_tokens=block_tokens,
            deadline_s=deadline_s,
            weight_cache=weight_cache,
            device=device,
            limits=ServeLimits(
                requests_max=requests_max, answer_tokens_default=answer_tokens_default
            ),
        )
    )
