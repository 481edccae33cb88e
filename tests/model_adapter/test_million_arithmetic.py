"""Position arithmetic at the ends of the range: rotations and block names (ds41f §1 rope)."""

import hashlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kvstore import block_keys
from model_adapter.config import ModelConfig, RopeSpec
from model_adapter.errors import InputError
from model_adapter.replay import plan_resume
from model_adapter.rope import frequencies, rotate_, rotations

RELEASED = ModelConfig.load(Path(__file__).parents[1] / "golden" / "released")
POSITIONS = 1 << 20
ENDS = (0, 1, 65_535, 65_536, POSITIONS - 2, POSITIONS - 1)
BLOCK_TOKENS = 256


def test_the_released_model_has_a_million_positions():
    assert RELEASED.positions_max == POSITIONS
    assert RELEASED.rope.factor * RELEASED.rope.original_positions == POSITIONS


def turns(pair: int, positions: int) -> float:
    """Full turns of a pair of channels over so many positions, without YaRN."""
    return positions * RELEASED.rope.theta ** (-2 * pair / RELEASED.rope_dim) / (2 * math.pi)


def test_yarn_slows_what_turns_too_little_over_the_original_length():
    plain = frequencies(RopeSpec(RELEASED.rope.theta), RELEASED.rope_dim).double()
    slowed = frequencies(RELEASED.rope, RELEASED.rope_dim).double() / plain
    low = max(p for p in range(32) if turns(p, 65_536) >= 32)
    high = min(p for p in range(32) if turns(p, 65_536) <= 1)
    assert 0 < low < high < 31
    for pair in range(32):
        expected = min(max((pair - low) / (high - low), 0), 1)
        expected = expected / 16 + 1 - expected
        assert float(slowed[pair]) == pytest.approx(expected, rel=1e-6), pair
    # at the last position a slowed pair stands where the plain one stood at the original length
    end = float(frequencies(RELEASED.rope, RELEASED.rope_dim)[high]) * POSITIONS
    assert end == pytest.approx(float(plain[high]) * 65_536, rel=1e-6)


@pytest.mark.parametrize("spec", [RELEASED.rope, RopeSpec(RELEASED.window_theta)])
def test_rotations_are_those_of_the_float32_product_of_position_and_frequency(spec):
    freqs = frequencies(spec, RELEASED.rope_dim)
    turned = rotations(torch.tensor(ENDS), freqs).numpy()
    angles = np.float32(ENDS)[:, None] * freqs.numpy()
    assert angles.dtype == np.float32
    assert angles.max() == POSITIONS - 1
    assert np.abs(turned - np.exp(1j * angles.astype(np.float64))).max() < 1e-6
    assert np.array_equal(turned[0], np.ones(32))


def test_turning_back_undoes_a_turn_at_every_end():
    freqs = frequencies(RELEASED.rope, RELEASED.rope_dim)
    turned = rotations(torch.tensor(ENDS), freqs)
    x = torch.randn(len(ENDS), RELEASED.head_dim, generator=torch.Generator().manual_seed(0))
    there = rotate_(x.clone(), turned)
    assert torch.equal(there[:, :-64], x[:, :-64])
    assert not torch.allclose(there[1:, -64:], x[1:, -64:], atol=0.1)
    assert torch.allclose(rotate_(there, turned.conj()), x, atol=1e-5)


def test_a_product_depends_on_the_distance_alone_up_to_float32_angles():
    freqs = frequencies(RELEASED.rope, RELEASED.rope_dim)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 64, generator=generator) for _ in range(2))

    def product(t: int, distance: int) -> float:
        at = rotations(torch.tensor([t, t - distance]), freqs)
        return float((rotate_(q.clone(), at[:1]) * rotate_(k.clone(), at[1:])).sum())

    # an angle near 2^20 is rounded to 1/16 of a radian
    bound = float(q.norm() * k.norm()) / 16
    for distance in (0, 1, 127, 65_536):
        near = product(65_536, distance)
        assert product(POSITIONS - 1, distance) == pytest.approx(near, abs=bound)


def test_block_names_at_the_end_of_the_range():
    ids = np.arange(POSITIONS, dtype=np.uint32) % 129_280
    parent = hashlib.sha256(b"namespace").digest()
    keys = block_keys(parent, ids, BLOCK_TOKENS)
    assert len(keys) == len(set(keys)) == 4096
    assert block_keys(parent, ids[:-1], BLOCK_TOKENS) == keys[:-1]
    for i in (0, 1, 4094, 4095):
        h = hashlib.sha256(b"ds41-kvstore/v1/block\0" + (keys[i - 1] if i else parent))
        h.update(ids[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS].astype("<u4").tobytes())
        assert keys[i] == h.digest()
    ids[0] += 1
    assert not set(block_keys(parent, ids, BLOCK_TOKENS)) & set(keys)


def test_the_longest_hit_leaves_a_block_to_compute():
    longest = POSITIONS - BLOCK_TOKENS
    plan = plan_resume("bounded", longest, POSITIONS, RELEASED.window)
    assert (plan.start, plan.write_from) == (longest - 128, longest)
    assert (plan.decoder_from, plan.stop) == (POSITIONS - 128, POSITIONS)
    with pytest.raises(InputError, match=f"a hit of {POSITIONS} tokens can't be resumed"):
        plan_resume("bounded", POSITIONS, POSITIONS, RELEASED.window)
