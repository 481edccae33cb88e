"""Selection: exact order among equals, and the streamed scan against a direct one."""

import numpy as np
import pytest
import torch
from golden_model import config, model

from model_adapter import indexer as indexer_module
from model_adapter import records
from model_adapter.forward_pass import Selection, Span
from model_adapter.indexer import Indexer
from model_adapter.topk import RunningTopK, packed, unpacked

POSITIONS = 100
CONTEXT = 37


def direct_order(scores: list[float], numbers: list[int]) -> list[int]:
    """Best first, the lower number first among equals."""
    return [n for _, n in sorted(zip([-s for s in scores], numbers, strict=True))]


@pytest.mark.parametrize("chunk", [1, 3, 50])
@pytest.mark.parametrize("k", [1, 5, 60])
def test_running_topk_prefers_the_lower_number(k, chunk):
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(-3, 3, (4, 50), generator=generator).float() / 2
    scores[scores == 0] *= -1.0
    scores[1, 10:] = -torch.inf
    best = RunningTopK(4, k)
    for at in range(0, 50, chunk):
        numbers = torch.arange(at, min(at + chunk, 50))
        best.add(packed(scores[:, at : at + chunk], numbers))
    for row, chosen in zip(scores.tolist(), best.numbers().tolist(), strict=True):
        allowed = [n for n in range(50) if row[n] != -float("inf")]
        expected = sorted(direct_order([row[n] for n in allowed], allowed)[:k])
        assert [n for n in chosen if n >= 0] == expected
        assert chosen == sorted(chosen, key=lambda n: (n < 0, n))


def test_packing_keeps_order_and_number():
    scores = torch.tensor([-torch.inf, -1e30, -1.0, -1e-40, 0.0, 1e-40, 1.0, 3e38, torch.inf])
    keys = packed(scores, torch.full((9,), 2**32 - 1))
    assert (keys.diff() > 0).all()
    assert unpacked(packed(scores[1:], torch.arange(8))).tolist() == list(range(8))
    both_zeros = packed(torch.tensor([0.0, -0.0]), torch.zeros(1, dtype=torch.int64))
    assert both_zeros[0] == both_zeros[1]


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(indexer_module, "SCAN_TILE_BYTES_MAX", 1)
    monkeypatch.setattr(indexer_module, "QUERY_ROWS_MAX", 7)


class Setting:
    """Random index keys, and the indexers of the candidate source and of a later Reindex layer.

    Keys repeat and many scores are zero, so that order among equals decides.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = model(dtype)
        c = self.model.config
        rng = np.random.default_rng(1)
        keys = rng.standard_normal((20, c.index_dim), np.float32)
        self.keys = np.maximum(keys, -0.3)[rng.integers(0, 20, POSITIONS + CONTEXT)]
        self.cache = self.model.new_cache()
        self.cache.index(6).append(records.pack(records.INDEX, torch.from_numpy(self.keys)))
        generator = torch.Generator().manual_seed(2)
        self.q_latent = torch.randn(POSITIONS, c.q_rank, generator=generator).to(dtype)
        self.x = torch.randn(POSITIONS, c.hidden, generator=generator).to(dtype)
        span = Span(self.cache, CONTEXT, CONTEXT + POSITIONS, slice(0, POSITIONS))
        self.work = self.model.forward_pass([span])

    def layer(self, index: int) -> Indexer:
        c = self.model.config
        return Indexer(c, c.layer_specs[index], self.model.weights)

    def select(self, index: int) -> Selection:
        with torch.inference_mode():
            self.layer(index).select(self.q_latent, self.x, self.work)
        selection = self.work.selections[0]
        assert selection is not None
        return selection

    def scores(self, index: int) -> list[list[float]]:
        """Every visible entry's score, one product at a time."""
        q, w = self.layer(index)._queries(self.q_latent, self.x, self.work)
        keys = records.unpack(records.INDEX, self.cache.index(6).rows)
        rows = []
        for t in range(POSITIONS):
            dots = torch.stack([(q[t] * k).sum(1) for k in keys[: CONTEXT + t + 1]])
            rows.append((dots.to(w.dtype).relu() * w[t]).sum(1).float().tolist())
        return rows


def chosen(selection: torch.Tensor) -> list[list[int]]:
    return [[n for n in row if n >= 0] for row in selection.tolist()]


def direct_blocks(row: list[float], size: int, kept: int) -> list[int]:
    best = [max(row[at : at + size]) for at in range(0, len(row), size)]
    best[-1] = float("inf")
    return sorted(direct_order(best, list(range(len(best))))[:kept])


@pytest.mark.parametrize("tiles", ["whole", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hierarchical_selection_equals_a_direct_one(dtype, tiles, request):
    if tiles == "small":
        request.getfixturevalue("small_tiles")
    setting, c = Setting(dtype), config()
    size, kept = c.candidate_block_size, c.candidate_blocks
    source = setting.select(c.candidate_source)
    scores = setting.scores(c.candidate_source)
    numbers = range(CONTEXT + POSITIONS)
    blocks = [direct_blocks(row, size, kept) for row in scores]
    assert source.blocks is not None
    assert chosen(source.blocks) == blocks
    assert chosen(source.entries) == [
        sorted(direct_order(row, list(numbers[: len(row)]))[: c.index_topk]) for row in scores
    ]
    reindexed = setting.select(8)
    for row, allowed, mine in zip(
        setting.scores(8), blocks, chosen(reindexed.entries), strict=True
    ):
        inside = [n for n in range(len(row)) if n // size in allowed]
        expected = sorted(direct_order([row[n] for n in inside], inside)[: c.index_topk])
        assert mine == expected
    assert reindexed.blocks is source.blocks


def test_equal_scores_are_common_in_this_setting():
    row = Setting(torch.float32).scores(6)[-1]
    assert len(set(row)) < len(row) / 3


def test_few_entries_are_all_selected():
    setting, c = Setting(torch.float32), config()
    short = setting.model.new_cache()
    short.index(2).append(records.pack(records.INDEX, torch.from_numpy(setting.keys[:4])))
    count = 9
    setting.work = setting.model.forward_pass([Span(short, 0, count, slice(0, count))])
    setting.q_latent, setting.x = setting.q_latent[:count], setting.x[:count]
    selection = setting.select(2)
    ratio = c.compress_ratios[2]
    assert chosen(selection.entries) == [list(range((t + 1) // ratio)) for t in range(count)]
    assert selection.blocks is None
