"""`ds41f prefill` and `ds41f decode`: the two nodes of one request."""

from pathlib import Path
from typing import Annotated

import typer

from model_adapter.commands.generate import Device, Dtype, Images, Mode

_Checkpoint = Annotated[Path, typer.Option(help="Checkpoint directory.")]
_Store = Annotated[
    str, typer.Option(envvar="KVSTORE_URL", help="unix:///socket or dns:///host:port.")
]
_RequestId = Annotated[str, typer.Option(help="Name that both nodes call the request by.")]
_Speculate = Annotated[
    bool, typer.Option(help="Use the draft layers; the tokens are the same. On both nodes.")
]
_ModeOption = Annotated[Mode, typer.Option(help="What a prefill computes; equal on both nodes.")]
_DtypeOption = Annotated[
    Dtype, typer.Option(help="What the model computes in; equal on both nodes.")
]
_BlockTokens = Annotated[int, typer.Option(min=1, help="Tokens per block.")]
_DeadlineS = Annotated[float, typer.Option(help="Longest wait for one answer of the store.")]
_WeightCache = Annotated[
    str, typer.Option(help="Most memory for dequantised weights, such as 512MiB.")
]
_Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
_TopP = Annotated[float, typer.Option(help="Only the likeliest tokens that reach this share.")]
_Seed = Annotated[int | None, typer.Option(help="Of the sampling; drawn where there is none.")]


def prefill(
    checkpoint: _Checkpoint,
    store: _Store,
    request_id: _RequestId,
    prompt_file: Annotated[Path, typer.Option(help="UTF-8 text of the prompt.")],
    image: Images = None,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    seed: _Seed = None,
    ttl_s: Annotated[
        float | None,
        typer.Option(help="Seconds that the hand-over stays.", show_default="the store's"),
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Positions per prefill chunk.")] = 1024,
    speculate: _Speculate = False,
    mode: _ModeOption = Mode.BOUNDED,
    dtype: _DtypeOption = Dtype.FLOAT32,
    block_tokens: _BlockTokens = 256,
    deadline_s: _DeadlineS = 10.0,
    weight_cache: _WeightCache = "4GiB",
    device: Device = "cpu",
) -> None:
    """Run a prompt and hand it over: blocks as chunks finish, then the state behind the prompt.

    Exit status 3: not handed over (the store was lost, or has no room); retry.
    """
    from model_adapter.commands import run_handover
    from model_adapter.commands.prompt_files import PromptFiles
    from model_adapter.handover import Sampling

    node = run_handover.Node(
        *(checkpoint, store, request_id, mode.value, dtype.value, speculate),
        *(block_tokens, deadline_s, weight_cache, device),
    )
    sampling = Sampling(temperature, top_p, run_handover.seed_of(seed))
    run_handover.prefill(node, PromptFiles(prompt_file, image or ()), sampling, ttl_s, chunk_tokens)


def decode(
    checkpoint: _Checkpoint,
    store: _Store,
    request_id: _RequestId,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Longest wait for the hand-over, from the start on.")
    ] = 60.0,
    recompute: Annotated[
        bool, typer.Option(help="Prefill here where the hand-over does not come or can't be used.")
    ] = False,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="For --recompute where the prompt has gone from the store too, or has images."
        ),
    ] = None,
    image: Images = None,
    temperature: _Temperature = 0.0,
    top_p: _TopP = 1.0,
    seed: _Seed = None,
    keep: Annotated[
        bool, typer.Option(help="Leave the hand-over in the store behind the answer.")
    ] = False,
    ids: Annotated[
        bool, typer.Option(help="Print token ids, one a line as they come, in place of text.")
    ] = False,
    speculate: _Speculate = False,
    mode: _ModeOption = Mode.BOUNDED,
    dtype: _DtypeOption = Dtype.FLOAT32,
    block_tokens: _BlockTokens = 256,
    deadline_s: _DeadlineS = 10.0,
    weight_cache: _WeightCache = "4GiB",
    device: Device = "cpu",
) -> None:
    """Take a request over from `ds41f prefill` and generate; fetches blocks while that runs.

    Exit status 3: the hand-over did not come in time; run the prefill again and retry. 4: it, or
    blocks before it, can't be used; recompute. The temperature and what belongs to it are the
    prefill's, except with --prompt-file where the store has nothing of the request.
    """
    from model_adapter.commands import run_handover
    from model_adapter.commands.prompt_files import PromptFiles
    from model_adapter.errors import InputError
    from model_adapter.handover import Sampling

    if image and prompt_file is None:
        raise InputError("--image needs the --prompt-file that it belongs to")
    node = run_handover.Node(
        *(checkpoint, store, request_id, mode.value, dtype.value, speculate),
        *(block_tokens, deadline_s, weight_cache, device),
    )
    run_handover.decode(
        node,
        run_handover.Answering(max_tokens, wait_s, recompute, keep, ids),
        PromptFiles(prompt_file, image or ()) if prompt_file else None,
        Sampling(temperature, top_p, run_handover.seed_of(seed)),
    )
