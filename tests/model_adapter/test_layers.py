"""Parts of a layer against their definitions: rotary frequencies, streams, router, hashes."""

import math

import numpy as np
import pytest
import torch
from golden_model import config, model

from model_adapter.config import EngramConfig, RopeSpec
from model_adapter.engram import EngramHasher, table_rows
from model_adapter.errors import ConfigError
from model_adapter.hyper_connections import Coefficients, collapse, sinkhorn, spread
from model_adapter.moe import MoE
from model_adapter.norms import rms_norm
from model_adapter.rope import frequencies, rotate_, rotations

RELEASED_ROPE = RopeSpec(160000.0, 16.0, 32.0, 1.0, 65536)
RELEASED_ENGRAM = EngramConfig(
    layers=(1, 14),
    table_rows=(384006168, 384016682),
    ngram_max=4,
    bucket_size=16000000,
    heads=8,
    head_dim=256,
    pad_token=2,
    compressed_vocab=99092,
)


def test_yarn_keeps_fast_and_divides_slow_frequencies():
    freqs = frequencies(RELEASED_ROPE, 64)
    plain = [160000.0 ** (-2 * i / 64) for i in range(32)]
    low = math.floor(64 * math.log(65536 / (32 * 2 * math.pi)) / (2 * math.log(160000)))
    high = math.ceil(64 * math.log(65536 / (2 * math.pi)) / (2 * math.log(160000)))
    assert 0 < low < high < 32
    for i, mine in enumerate(freqs.tolist()):
        share = min(max((i - low) / (high - low), 0), 1)
        expected = plain[i] / 16 * share + plain[i] * (1 - share)
        assert mine == pytest.approx(expected, rel=1e-6)


def test_without_a_factor_frequencies_are_plain():
    freqs = frequencies(RopeSpec(10000.0), 16)
    assert freqs.tolist() == pytest.approx([10000.0 ** (-i / 8) for i in range(8)], rel=1e-6)


def test_rotation_turns_adjacent_pairs_of_the_last_channels():
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 1_048_575])
    freqs = torch.tensor([1.0, 0.25])
    turned = rotate_(x.clone(), rotations(positions, freqs))
    assert torch.equal(turned[:, :6], x[:, :6])
    for row, t in enumerate(positions.tolist()):
        for pair, f in enumerate((1.0, 0.25)):
            a, b = x[row, 6 + 2 * pair].item(), x[row, 7 + 2 * pair].item()
            cos, sin = math.cos(t * f), math.sin(t * f)
            expected = [a * cos - b * sin, a * sin + b * cos]
            assert turned[row, 6 + 2 * pair : 8 + 2 * pair].tolist() == pytest.approx(
                expected, abs=1e-5
            )
    back = rotate_(turned, rotations(positions, freqs).conj())
    torch.testing.assert_close(back, x)


def test_bfloat16_is_rotated_in_float32():
    x = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotation = rotations(torch.arange(4), torch.tensor([0.7, 0.1])).unsqueeze(1)
    expected = rotate_(x.float(), rotation).bfloat16()
    assert torch.equal(rotate_(x.clone(), rotation), expected)


def test_norm_rounds_once():
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.rand(32, generator=torch.Generator().manual_seed(1))
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-20).double(), exact, rtol=2**-8, atol=0)


def test_sinkhorn_ends_on_columns_and_nearly_fits_the_rows():
    logits = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(0))
    m = sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(m.sum(1), torch.ones(6, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(m.sum(2), torch.ones(6, 4), atol=1e-3, rtol=0)
    once = torch.softmax(logits, 2) + 1e-6
    once = once / (once.sum(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(sinkhorn(logits, 1, 1e-6), once)


@pytest.mark.parametrize("elements", [1, 1 << 20])
def test_streams_are_mixed_from_axis_one_to_axis_two(monkeypatch, elements):
    monkeypatch.setattr("model_adapter.hyper_connections.SPREAD_ELEMENTS_MAX", elements)
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(3, 4, 8, generator=generator)
    output = torch.randn(3, 8, generator=generator)
    pre, post = torch.rand(3, 4, generator=generator), torch.rand(3, 4, generator=generator)
    comb = torch.rand(3, 4, 4, generator=generator)
    out = spread(streams, output, Coefficients(pre, post, comb))
    for t in range(3):
        for j in range(4):
            expected = post[t, j] * output[t]
            expected = expected + sum(comb[t, i, j] * streams[t, i] for i in range(4))
            torch.testing.assert_close(out[t, j], expected)
    mixed = sum(pre[:, i, None] * streams[:, i] for i in range(4))
    torch.testing.assert_close(collapse(streams, pre), mixed)


class FixedScores:
    """Weights of a router whose scores do not depend on the input."""

    def __init__(self, bias: list[float], bias_vl: list[float]) -> None:
        self.vectors = {
            "layers.0.ffn.gate.weight": torch.zeros(8, config().hidden),
            "layers.0.ffn.gate.bias": torch.tensor(bias),
            "layers.0.ffn.gate.bias_vl": torch.tensor(bias_vl),
        }

    def vector(self, name: str) -> torch.Tensor:
        return self.vectors[name]


def test_router_takes_the_lower_expert_among_equals_and_the_bias_of_the_modality():
    weights = FixedScores([0, 0, 1, 0, 0, 1, 1, 0], [3, 0, 0, 0, 0, 0, 0, 2])
    moe = MoE(config(), config().layer_specs[0], weights)
    x = torch.randn(3, config().hidden)
    chosen, share = moe.route(x, torch.tensor([False, True, False]))
    assert chosen.tolist() == [[2, 5], [0, 7], [2, 5]]
    # The bias chooses, it does not weigh: equal scores share the route scale equally.
    torch.testing.assert_close(share, torch.full((3, 2), config().route_scale / 2))
    assert moe.route(x, None)[0].tolist() == [[2, 5]] * 3


def test_experts_sum_what_each_position_chose():
    moe = MoE(config(), config().layer_specs[3], model().weights)
    x = torch.randn(9, config().hidden, generator=torch.Generator().manual_seed(3))
    together = moe.forward(x, None)
    alone = torch.cat([moe.forward(row, None) for row in x.split(1)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_released_tables_are_as_long_as_their_primes_add_up_to():
    assert table_rows(RELEASED_ENGRAM) == list(RELEASED_ENGRAM.table_rows)


def direct_hash(hasher: EngramHasher, layer: int, tokens: list[int], t: int) -> list[int]:
    """The definition, one lookup at a time."""
    c, image = config().engram, config().image_token
    functions = hasher._layers[layer]
    ids = []
    for s in range(c.ngram_max):
        seen = tokens[max(t - s, 0) : t + 1]
        outside = t - s < 0 or image in seen
        ids.append(int(hasher.merged[c.pad_token if outside else tokens[t - s]]))
    rows = []
    for order in range(2, c.ngram_max + 1):
        mixed = 0
        for s in range(order):
            mixed ^= ids[s] * int(functions.multipliers[s])
        for head in range(c.heads):
            prime = int(functions.primes[order - 2, head])
            rows.append(mixed % prime + int(functions.offsets[order - 2, head]))
    return rows


@pytest.mark.parametrize("history", [0, 1, 3])
def test_hashes_equal_their_definition(history):
    engram = model().blocks[4].engram
    assert engram is not None
    tokens = np.random.default_rng(0).integers(0, 500, 40)
    tokens[[11, 12, 30]] = config().image_token
    # A token is never far enough from the cut for `history` to matter where it is the limit.
    rows = engram.hasher.rows(4, tokens[20 - history :], history)
    for t in range(20, 40):
        expected = direct_hash(engram.hasher, 4, tokens[20 - history :].tolist(), t - 20 + history)
        assert rows[t - 20].tolist() == expected


def test_a_table_shorter_than_its_hashes_reach_is_refused():
    short = EngramConfig(**(vars(RELEASED_ENGRAM) | {"table_rows": (384006168, 384016681)}))
    with pytest.raises(ConfigError, match=r"engram_num_embeddings\[1\] is 384016681"):
        EngramHasher(short, np.zeros(8, np.int64), None)
