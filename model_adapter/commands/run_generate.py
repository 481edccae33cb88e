"""What `ds41f generate` does; apart from its flags, so that `--help` loads no torch."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

import kvstore
from kvstore.errors import Unavailable
from model_adapter.commands.prompt_files import PromptFiles
from model_adapter.devices import device_of
from model_adapter.errors import InputError
from model_adapter.model import Model
from model_adapter.replay import Mode
from model_adapter.session import (
    CachedSession,
    RequestReport,
    SnapshotOutcome,
    StoreBlocks,
    namespace_of,
)
from model_adapter.tokenizer import decode_answer, load_tokenizer

logger = logging.getLogger(__name__)

_SNAPSHOT_WORDS = {
    SnapshotOutcome.OFF: "off",
    SnapshotOutcome.HIT: "hit; went on at its exact token",
    SnapshotOutcome.MISS: "none before the prompt's last token",
    SnapshotOutcome.SHORTER: "passed over; a replay from the blocks computes less",
    SnapshotOutcome.GONE: "gone since the lookup",
    SnapshotOutcome.UNUSABLE: "unusable; the log says why",
}


def parse_bytes(text: str) -> int:
    """`512MiB` in bytes. Raises `InputError` for what is no size."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise InputError(f"{text!r} is no size in bytes; write 512MiB or 4GiB") from None


def table_of(rows: Mapping[str, str]) -> Table:
    """Names and values."""
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def report_rows(r: RequestReport) -> dict[str, str]:
    """What was hit, replayed, computed, moved, and how long it took."""
    rows = {
        "prompt": f"{r.prompt_tokens} tokens",
        "prefix": r.outcome.value,
        "hit": f"{r.hit_tokens} tokens ({r.tiers})",
        "snapshot": _SNAPSHOT_WORDS[r.snapshot],
        "replayed": f"{r.replayed_tokens} tokens",
        "computed": f"{r.encoder_positions} encoder, {r.decoder_positions} decoder positions",
        "time to first token": f"{r.ttft_s:.3f} s, of which {r.fetch_s * 1e3:.1f} ms the store",
        "generated": f"{r.generated_tokens} tokens in {r.total_s:.3f} s",
        "fetched": f"{r.fetched_bytes:,} B",
        "stored": f"{r.stored_bytes:,} B in {r.stored_blocks} blocks, {r.present_blocks} present",
        "snapshots": f"{r.snapshot_bytes:,} B fetched, {r.stored_snapshots} stored",
    }
    if r.refused_blocks or r.refused_snapshots:
        rows["refused"] = f"{r.refused_blocks} blocks, {r.refused_snapshots} snapshots"
    if r.store_error:
        rows["store lost"] = r.store_error
    return rows


def _connect(store: str | None, deadline_s: float) -> kvstore.Client | None:
    """A daemon that is not there is no reason not to answer; a wrong URL or directory is."""
    if not store:
        return None
    try:
        return kvstore.connect(store, deadline_s=deadline_s)
    except Unavailable as e:
        logger.warning("going on without the store: %s", e)
        return None


def run(
    checkpoint: Path,
    given: PromptFiles,
    store: str | None,
    max_tokens: int,
    mode: Mode,
    dtype: str,
    snapshots: bool,
    block_tokens: int,
    deadline_s: float,
    weight_cache: str,
    device: str,
) -> None:
    """Generate and print: the text on stdout, the report on stderr."""
    place = device_of(device)
    prompt = given.read(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    model = Model.load(checkpoint, getattr(torch, dtype), parse_bytes(weight_cache), place)
    with ExitStack() as stack:
        source = None
        if client := _connect(store, deadline_s):
            stack.enter_context(client)
            source = StoreBlocks(client, namespace_of(model, checkpoint, block_tokens))
        session = CachedSession(model, source, mode, snapshots=snapshots)
        images = [placed.image for placed in prompt.images]
        generation = session.generate(
            prompt.token_ids, max_tokens, (model.config.eos_token,), images=images
        )
    print(decode_answer(tokenizer, generation.token_ids))
    Console(stderr=True).print(table_of(report_rows(generation.report)))
