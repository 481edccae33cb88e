"""Cache bytes by record and by context length, and what a prefill node hands over (ds41f §4, §5).

Sizes of the records themselves: what a store or a peer is given. Buffers around them are not
counted.
"""

from dataclasses import dataclass
from fractions import Fraction

from model_adapter.config import ModelConfig
from model_adapter.errors import InputError

_FLOAT32_BYTES = 4
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class RecordSize:
    """One kind of record. `name`: `main`, `index`, `window`, `DSpark window`, `pending pair row`.

    `layers`: that hold it. `ratio`: tokens per record, 0 where not every token leaves one that
    stays. `tokens_max`: positions that are kept, None for all.
    """

    name: str
    record_bytes: int
    layers: tuple[int, ...]
    ratio: int
    tokens_max: int | None = None

    @property
    def bytes_per_token(self) -> Fraction:
        """Of all its layers together, per token of the context; 0 where only the last are kept."""
        if self.tokens_max is not None:
            return Fraction(0)
        return Fraction(self.record_bytes * len(self.layers), self.ratio)


@dataclass(frozen=True, slots=True)
class CacheEstimate:
    """Bytes of one sequence of `tokens` tokens.

    `encoder_windows`, `decoder_windows`: window KV of the two halves. `pending`: the open
    compression groups' rows.
    """

    tokens: int
    main: int
    index: int
    encoder_windows: int
    decoder_windows: int
    dspark_windows: int
    pending: int

    @property
    def global_kv(self) -> int:
        """What is persistent: main and index records of all positions."""
        return self.main + self.index

    @property
    def beside_global(self) -> int:
        """What a prefill node hands over beside the global KV: all windows, the pending rows and
        the first token."""
        windows = self.encoder_windows + self.decoder_windows + self.dspark_windows
        return windows + self.pending + _TOKEN_BYTES

    @property
    def handover(self) -> int:
        """All that a prefill node hands to a decode node."""
        return self.global_kv + self.beside_global


def record_sizes(config: ModelConfig) -> list[RecordSize]:
    """Every kind of record the model keeps; global ones once per role and ratio."""
    layers: dict[tuple[str, int, int], list[int]] = {}
    for cache in config.global_caches:
        layers.setdefault((cache.role, cache.row_bytes, cache.ratio), []).append(cache.layer)
    sizes = [
        RecordSize(role, row_bytes, tuple(where), ratio)
        for (role, row_bytes, ratio), where in sorted(layers.items(), reverse=True)
    ]
    row_bytes, backbone = config.window_row_bytes, tuple(range(config.layers))
    sizes.append(RecordSize("window", row_bytes, backbone, 1, config.window))
    if config.draft_specs:
        drafts = tuple(spec.index for spec in config.draft_specs)
        sizes.append(RecordSize("DSpark window", row_bytes, drafts, 1, config.window))
    for ratio in sorted({config.compress_ratios[i] for i in config.kv_sources} - {1}):
        where = tuple(i for i in config.kv_sources if config.compress_ratios[i] == ratio)
        sizes.append(RecordSize("pending pair row", _pending_bytes(config), where, 1, ratio - 1))
    return sizes


def global_bytes_per_token(config: ModelConfig) -> Fraction:
    """Persistent bytes per token; a fraction where a ratio does not divide a record."""
    return sum((size.bytes_per_token for size in record_sizes(config)), Fraction(0))


def block_bytes(config: ModelConfig, block_tokens: int) -> int:
    """One block, all sections. Raises `InputError` for a size that does not fit the ratios."""
    if block_tokens < 1 or block_tokens % config.group_tokens:
        raise InputError(
            f"block_tokens {block_tokens} is not a multiple of the compression ratios "
            f"(least common multiple {config.group_tokens})"
        )
    return sum(block_tokens // c.ratio * c.row_bytes for c in config.global_caches)


def estimate(config: ModelConfig, tokens: int) -> CacheEstimate:
    """Bytes of a sequence of `tokens` tokens.

    Raises `InputError` for a length outside the model's positions.
    """
    if not 1 <= tokens <= config.positions_max:
        raise InputError(
            f"a context of {tokens} tokens is outside the model's 1…{config.positions_max} "
            "positions"
        )
    rows = {"main": 0, "index": 0}
    for cache in config.global_caches:
        rows[cache.role] += tokens // cache.ratio * cache.row_bytes
    window = min(tokens, config.window) * config.window_row_bytes
    open_rows = sum(tokens % config.compress_ratios[i] for i in config.kv_sources)
    return CacheEstimate(
        tokens=tokens,
        main=rows["main"],
        index=rows["index"],
        encoder_windows=config.decoder_start * window,
        decoder_windows=(config.layers - config.decoder_start) * window,
        dspark_windows=len(config.draft_specs) * window,
        pending=open_rows * _pending_bytes(config),
    )


def _pending_bytes(config: ModelConfig) -> int:
    """One position's values and scores, float32 [2, D]."""
    return 2 * config.head_dim * _FLOAT32_BYTES
