"""Engram: hashed n-gram lookups added to the streams (ds41f §2 Engram, report §2.4.2)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from model_adapter.config import EngramConfig, ModelConfig
from model_adapter.errors import ConfigError
from model_adapter.few_rows import by_row, linear
from model_adapter.forward_pass import ForwardPass
from model_adapter.norms import rstd
from model_adapter.weights import Weights

Ids = npt.NDArray[np.int64]

_SEED_PER_LAYER = 10007
_INT64_MAX = 2**63 - 1
_DOT_MIN = 1e-6


@dataclass(frozen=True)
class LayerHash:
    """One layer's hash functions, int64: `multipliers` [n-gram max], `primes` and row `offsets`
    [orders, heads]."""

    multipliers: Ids
    primes: Ids
    offsets: Ids


class EngramHasher:
    """Token ids to table rows. `merged`: merged id of every vocabulary id, int64 [vocab].

    Raises `ConfigError` where a table has fewer rows than its primes add up to.
    """

    def __init__(self, config: EngramConfig, merged: Ids, image_token: int | None) -> None:
        self._config = config
        self.merged = merged
        self._image_token = image_token
        self._pad = merged[config.pad_token]
        self._layers = dict(zip(config.layers, _layer_hashes(config), strict=True))

    @property
    def history_tokens(self) -> int:
        """Tokens before a position that its hashes depend on."""
        return self._config.ngram_max - 1

    def rows(self, layer: int, tokens: Ids, history: int) -> Ids:
        """Table rows [T, orders·heads] for `tokens[history:]`; the first `history` are context.

        What lies before `tokens` counts as before the start of the sequence, so pass
        `history_tokens` of context where there are that many.
        """
        c, functions = self._config, self._layers[layer]
        terms = [
            ids * functions.multipliers[s] for s, ids in enumerate(self._shifted(tokens, history))
        ]
        rows = []
        mixed = terms[0]
        for order in range(c.ngram_max - 1):
            mixed = mixed ^ terms[order + 1]
            rows.append(mixed[:, None] % functions.primes[order] + functions.offsets[order])
        return np.concatenate(rows, axis=1)

    def _shifted(self, tokens: Ids, history: int) -> list[Ids]:
        """Merged ids at t, t−1, … for every t; pad from an image token or the start backwards."""
        context = self._config.ngram_max - 1
        ids = self.merged[tokens]
        outside = np.zeros(len(tokens), bool)
        if self._image_token is not None:
            outside = tokens == self._image_token
        ids = np.concatenate([np.zeros(context, np.int64), ids])
        outside = np.concatenate([np.ones(context, bool), outside])
        first, stop = context + history, context + len(tokens)
        shifted, cut = [], np.zeros(stop - first, bool)
        for s in range(context + 1):
            cut = cut | outside[first - s : stop - s]
            shifted.append(np.where(cut, self._pad, ids[first - s : stop - s]))
        return shifted


class Engram:
    """The lookup and gating of one layer."""

    def __init__(
        self, config: ModelConfig, layer: int, hasher: EngramHasher, weights: Weights
    ) -> None:
        self._layer = layer
        self._prefix = f"layers.{layer}.engram"
        self._hidden = config.hidden
        self._streams = config.streams
        self._eps = config.norm_eps
        self.hasher = hasher
        self._weights = weights

    def rows(self, work: ForwardPass) -> Ids:
        """Table rows [T, orders·heads] at the pass's positions."""
        parts = []
        for span in work.spans:
            history = min(span.start, self.hasher.history_tokens)
            tokens = span.cache.token_ids[span.start - history : span.stop].astype(np.int64)
            parts.append(self.hasher.rows(self._layer, tokens, history))
        return np.concatenate(parts)

    def forward(self, streams: torch.Tensor, work: ForwardPass) -> torch.Tensor:
        """Streams [T, n, H] with the gated value added; image positions stay as they are."""
        rows = torch.from_numpy(self.rows(work))
        found = self._weights.rows(f"{self._prefix}.embed", rows).flatten(1)
        projected = linear(found, self._weights.matrix(f"{self._prefix}.wkv"))
        keys, value = projected.split([self._streams * self._hidden, self._hidden], dim=1)
        keys = keys.float().unflatten(1, (self._streams, -1))
        gate = by_row(self._gate, streams.float(), keys)
        if work.image_mask is not None:
            gate = gate.masked_fill(work.image_mask[:, None, None], 0.0)
        return (streams.float() + gate * value.float().unsqueeze(1)).to(streams.dtype)

    def _gate(self, streams: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """float32 [T, n, 1] from float32 streams and keys [T, n, H]."""
        weight = self._weights.vector(f"{self._prefix}.q_weight") * self._weights.vector(
            f"{self._prefix}.k_weight"
        )
        dot = (streams * weight * keys).sum(-1, keepdim=True)
        dot = dot * rstd(streams, self._eps) * rstd(keys, self._eps) * self._hidden**-0.5
        return (dot.sign() * dot.abs().clamp_min(_DOT_MIN).sqrt()).sigmoid()


def _layer_hashes(config: EngramConfig) -> list[LayerHash]:
    primes = _primes(config)
    hashes = []
    for i, layer in enumerate(config.layers):
        used = int(primes[i].sum())
        if used > config.table_rows[i]:
            raise ConfigError(
                f"engram_num_embeddings[{i}] is {config.table_rows[i]}, but layer {layer}'s "
                f"hashes reach {used} rows"
            )
        ends = primes[i].flatten().cumsum()
        offsets = np.concatenate([[0], ends[:-1]]).reshape(primes[i].shape)
        hashes.append(LayerHash(_multipliers(config, layer), primes[i], offsets))
    return hashes


def _multipliers(config: EngramConfig, layer: int) -> Ids:
    """Odd factors small enough that factor × merged id stays within int64."""
    bound = max(1, _INT64_MAX // config.compressed_vocab // 2)
    rng = np.random.default_rng(_SEED_PER_LAYER * layer)
    return rng.integers(0, bound, size=config.ngram_max, dtype=np.int64) * 2 + 1


def _primes(config: EngramConfig) -> Ids:
    """int64 [layers, orders, heads], all distinct."""
    used: set[int] = set()
    found = []
    for _ in range(len(config.layers) * (config.ngram_max - 1)):
        prime = config.bucket_size - 1
        for _ in range(config.heads):
            prime = _next_prime(prime, used)
            used.add(prime)
            found.append(prime)
    shape = (len(config.layers), config.ngram_max - 1, config.heads)
    return np.array(found, np.int64).reshape(shape)


def table_rows(config: EngramConfig) -> list[int]:
    """Rows that each layer's hashes reach; a table may have more."""
    return [int(primes.sum()) for primes in _primes(config)]


def _next_prime(above: int, used: set[int]) -> int:
    candidate = above + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(n: int) -> bool:
    if n < 4:
        return n >= 2
    if n % 2 == 0:
        return False
    divisors = np.arange(3, int(n**0.5) + 1, 2)
    return bool((n % divisors).all())
