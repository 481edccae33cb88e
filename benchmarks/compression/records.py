"""Sections of cache records: of a model's run over a prompt, and of Gaussian latents."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import kernels
import kvstore
from kvstore import DS41F_LAYOUT

Bytes = npt.NDArray[np.uint8]
CODE_BYTES = {288: 256, 68: 64}
"""Of a row, per row size: how many bytes of codes come before the scales."""


class Sample(NamedTuple):
    """Sections of one kind. `rows`: [sections, rows, row bytes]."""

    source: str
    kind: str
    ratio: int
    rows: Bytes

    @property
    def section_bytes(self) -> int:
        """Of one section."""
        return int(self.rows[0].nbytes)

    def parts(self, separated: bool) -> list[bytes]:
        """What is packed as one: a section as it is stored, its rows one behind the other; or, two
        of each, the codes of all its rows and the scales of all its rows."""
        if not separated:
            return [section.tobytes() for section in self.rows]
        at = CODE_BYTES[self.rows.shape[2]]
        pairs = ((section[:, :at], section[:, at:]) for section in self.rows)
        return [part.tobytes() for pair in pairs for part in pair]


def gaussian(blocks: int, seed: int = 0) -> Iterator[Sample]:
    """Normal latents whose channels differ in size, a few of them by much, as those of language
    models do: quantised by the kernels."""
    rng = np.random.default_rng(seed)
    for section in DS41F_LAYOUT.sections[:2] + DS41F_LAYOUT.sections[6:]:
        channels = 512 if section.row_bytes == 288 else 128
        sizes = np.exp(rng.normal(0, 0.5, channels))
        sizes[rng.choice(channels, channels // 64, replace=False)] *= 20
        rows = DS41F_LAYOUT.block_tokens // section.ratio
        x = (rng.normal(size=(blocks, rows, channels)) * sizes).astype(np.float32)
        quantize = kernels.nvfp4_quantize if channels == 512 else kernels.mxfp4_quantize
        kind = "main" if channels == 512 else "index"
        yield Sample("Gaussian latents", kind, section.ratio, quantize(x))


def of_a_run(preset: str, tokens: int) -> Iterator[Sample]:
    """What a random checkpoint of `preset` stores of a prompt of random tokens, by kind and ratio.
    `wide` has the released widths, takes minutes and 1 GB of disk."""
    from model_adapter.make_checkpoint import write_checkpoint
    from model_adapter.model import Model
    from model_adapter.presets import preset_config
    from model_adapter.session import CachedSession, StoreBlocks, namespace_of

    ids = np.random.default_rng(0).integers(11, 2000, tokens).astype(np.uint32)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(preset_config(preset), 0, checkpoint)
        model = Model.load(checkpoint)
        namespace = namespace_of(model, checkpoint, DS41F_LAYOUT.block_tokens)
        settings = {"dram": {"budget_bytes": "256MiB"}}
        with kvstore.connect(f"file://{folder}/store", **settings) as client:
            CachedSession(model, StoreBlocks(client, namespace)).generate(ids, 1)
            handle = client.open_namespace(namespace)
            keys = handle.block_keys(ids)
            with client.acquire(handle, keys) as lease:
                blocks = [[bytes(s) for s in b.sections] for b in client.read(lease, keys)]
    assert blocks, "the prompt is shorter than a block"
    yield from _by_kind(f"`{preset}` run", namespace.layout, blocks)


def _by_kind(source: str, layout: kvstore.Layout, blocks: list[list[bytes]]) -> Iterator[Sample]:
    for kind, ratio in sorted({(s.role, s.ratio) for s in layout.sections}):
        found = [
            np.frombuffer(block[i], np.uint8).reshape(-1, section.row_bytes)
            for block in blocks
            for i, section in enumerate(layout.sections)
            if (section.role, section.ratio) == (kind, ratio)
        ]
        yield Sample(source, kind, ratio, np.stack(found))
