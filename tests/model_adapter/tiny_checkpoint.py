"""One `tiny` checkpoint per test process, and what the tests of sessions do with it."""

from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import kvstore
from model_adapter.generate import greedy
from model_adapter.make_checkpoint import make_checkpoint
from model_adapter.model import Model
from model_adapter.session import CachedSession, StoreBlocks, namespace_of

BLOCK_TOKENS = 32
WINDOW = 16
_kept: list[TemporaryDirectory] = []


@cache
def checkpoint() -> Path:
    """A `tiny` checkpoint, seed 0; read only."""
    _kept.append(TemporaryDirectory(prefix="tiny-"))
    path = Path(_kept[-1].name) / "checkpoint"
    make_checkpoint("tiny", 0, path)
    return path


@cache
def model() -> Model:
    return Model.load(checkpoint())


@cache
def namespace(block_tokens: int = BLOCK_TOKENS) -> kvstore.Namespace:
    return namespace_of(model(), checkpoint(), block_tokens)


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(11, 500, tokens).astype(np.uint32)


@contextmanager
def store(directory: Path, **settings):
    """An embedded store that leaves most of the disk alone."""
    small = {
        "dram": {"budget_bytes": "4MiB"},
        "ssd": {"budget_bytes": "16MiB", "segment_bytes": "1MiB", "free_floor_bytes": 0},
    }
    with kvstore.connect(f"file://{directory}", **(small | settings)) as client:
        yield client


def session(client, **options) -> CachedSession:
    return CachedSession(model(), StoreBlocks(client, namespace()), **options)


def rows_of(token_ids: Sequence[int]) -> list[list[np.ndarray]]:
    """The blocks that a full prefill leaves, without any store."""
    cache = model().new_cache()
    model().prefill(cache, token_ids)
    return [
        [s.copy() for s in cache.block_sections(i, BLOCK_TOKENS)]
        for i in range(len(token_ids) // BLOCK_TOKENS)
    ]


def replayed(token_ids: Sequence[int], blocks: list[list[np.ndarray]], max_tokens: int):
    """The answer after `blocks` were loaded, straight from the model."""
    cache = model().new_cache()
    for i, sections in enumerate(blocks):
        cache.load_block(i, BLOCK_TOKENS, sections)
    logits = model().resume(cache, token_ids, len(blocks) * BLOCK_TOKENS)
    return list(greedy(model(), cache, logits, max_tokens))


def plain(token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The answer of a full prefill, straight from the model."""
    cache = model().new_cache()
    return list(greedy(model(), cache, model().prefill(cache, token_ids), max_tokens))
