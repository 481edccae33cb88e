"""The caches of one sequence, held as the records that a store keeps (ds41f §4, §5), on the device
where the model computes.

Global KV and index keys of every source layer for all positions, window KV of every layer for the
last ones, the rows of open compression groups, and the token ids (Engram looks back at them).
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from model_adapter.cache_rows import GrowingTensor, OpenGroup, WindowRows
from model_adapter.config import GlobalCache, ModelConfig
from model_adapter.devices import CPU
from model_adapter.errors import CacheError
from model_adapter.records import HostRecords, Records, host
from model_adapter.snapshot import Computed, Part, PartKind, Snapshot, pack

Section = Records | HostRecords | memoryview | bytes
"""A section's bytes, of any shape, as a store hands them over: on the host, or a tensor."""
MAIN_ROLE = "main"
INDEX_ROLE = "index"


@dataclass(frozen=True, slots=True)
class Promise:
    """A section of some blocks that is on its way. `rows` uint8 [n, row bytes]: the memory that it
    goes to, on the cache's device. `done`: to be resolved when it is there, or failed with
    `SectionsLost`."""

    rows: Records
    done: "Future[None]"


class SequenceCache:
    """What one sequence has left behind so far.

    `length`: positions through the model; the next token stands at this position. Blocks loaded
    from outside count only once `Model.resume` has taken them up. Their sections may still be on
    their way (`promise_blocks`): whoever asks for a section's rows waits for it, and for no other.
    `waited_s`: seconds of that so far.
    """

    def __init__(self, config: ModelConfig, device: torch.device = CPU) -> None:
        self.device = device
        self._config = config
        self._specs = config.global_caches
        self._rows = {
            (s.layer, s.role): GrowingTensor((s.row_bytes,), torch.uint8, device)
            for s in self._specs
        }
        self._tokens = GrowingTensor((), torch.int32)
        self._promised: dict[tuple[int, str], Future[None]] = {}
        self.waited_s = 0.0
        self._failure: str | None = None
        self.length = 0
        self.windows = [
            WindowRows(config.window_row_bytes, config.window, device) for _ in range(config.layers)
        ]
        self.open_groups = {
            layer: OpenGroup(config.compress_ratios[layer], 2 * config.head_dim, device)
            for layer in config.kv_sources
            if config.compress_ratios[layer] > 1
        }

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Every token that went in, int32, on the host; a view."""
        ids: npt.NDArray[np.int32] = self._tokens.rows.numpy()
        return ids

    @property
    def loaded_tokens(self) -> int:
        """Positions whose global rows are here, or promised, in full, in every section."""
        return min(len(self._rows[s.layer, s.role]) * s.ratio for s in self._specs)

    def main(self, layer: int) -> GrowingTensor:
        """Global KV records of a source layer. Raises `SectionsLost` where they did not come."""
        return self._arrived(layer, MAIN_ROLE)

    def index(self, layer: int) -> GrowingTensor:
        """Index key records of a source layer; as `main`."""
        return self._arrived(layer, INDEX_ROLE)

    def rows(self, spec: GlobalCache) -> GrowingTensor:
        """The rows of one global cache; as `main`."""
        return self._arrived(spec.layer, spec.role)

    def _arrived(self, layer: int, role: str) -> GrowingTensor:
        promised = self._promised.get((layer, role))
        if promised is not None:
            start = time.perf_counter()
            promised.result()
            self.waited_s += time.perf_counter() - start
            del self._promised[layer, role]
        return self._rows[layer, role]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` positions in all."""
        self._tokens.reserve(tokens)
        for spec in self._specs:
            rows = -(-tokens // spec.ratio)
            if rows > self._rows[spec.layer, spec.role].capacity:
                self.rows(spec).reserve(rows)

    def append_tokens(self, token_ids: npt.NDArray) -> None:
        """Token ids behind the ones that are here."""
        self._tokens.append(token_ids)

    def block_sections(self, block: int, block_tokens: int) -> list[HostRecords]:
        """Block `block` as one array [block_tokens/ratio, row bytes] per section, on the host:
        views where the cache is there too, else copies.

        Order as in `ModelConfig.global_caches`. Raises `CacheError` where the block is not
        complete.
        """
        if (block + 1) * block_tokens > self.loaded_tokens:
            raise CacheError(
                f"block {block} of {block_tokens} tokens is not complete: global rows reach token "
                f"{self.loaded_tokens}"
            )
        return [
            host(self.rows(s).rows[self._row_range(s, block, block_tokens)]) for s in self._specs
        ]

    def load_block(self, block: int, block_tokens: int, sections: Sequence[Section]) -> None:
        """Append a block's sections, copied, to a cache that has computed nothing yet.

        Blocks come in order from 0. The copy of a tensor is queued where one of the two is on a
        GPU. Raises `CacheError` for a wrong number or size of sections, a
        block out of order, or a cache in use; nothing was changed then.
        """
        if self.length:
            raise CacheError(f"blocks go into a fresh cache, this one is {self.length} tokens long")
        if len(sections) != len(self._specs):
            raise CacheError(f"a block has {len(self._specs)} sections, not {len(sections)}")
        arrays = [self._section(i, block, block_tokens, data) for i, data in enumerate(sections)]
        for spec, rows in zip(self._specs, arrays, strict=True):
            self.rows(spec).append(rows)

    def to_snapshot(
        self, block_tokens: int, computed: Computed, drafts: Sequence[WindowRows] = ()
    ) -> bytearray:
        """The state at `length` but for its full blocks and token ids, as bytes.

        `computed`: how it came to be. `drafts`: the draft layers' windows, left out where they do
        not reach `length`. Raises `CacheError` for an empty cache.
        """
        self.check_usable()
        if not self.length:
            raise CacheError("an empty cache has no state to keep")
        parts = [_window_part(PartKind.WINDOW, *w, self._config) for w in enumerate(self.windows)]
        if all(rows.end == self.length for rows in drafts):
            parts += [
                _window_part(PartKind.DRAFT_WINDOW, *w, self._config) for w in enumerate(drafts)
            ]
        full = self.length // block_tokens * block_tokens
        for number, spec in enumerate(self._specs):
            first = full // spec.ratio
            rows = self.rows(spec).rows[first : self.length // spec.ratio]
            parts.append(Part(PartKind.SECTION, number, first, host(rows)))
        for layer, group in self.open_groups.items():
            pending = np.ascontiguousarray(group.pending().cpu().numpy(), "<f4").view(np.uint8)
            start = self.length - len(pending)
            parts.append(Part(PartKind.PENDING, layer, start, pending))
        return pack(self.length, block_tokens, computed, parts)

    def from_snapshot(
        self,
        snapshot: Snapshot,
        token_ids: npt.NDArray[np.integer],
        drafts: Sequence[WindowRows] = (),
    ) -> None:
        """Go on at the snapshot's position, its full blocks having been loaded.

        `token_ids`: of the positions before it. `drafts`: to restore too; where the snapshot has
        none they go on empty, which makes guesses worse and nothing wrong. Loaded rows behind the
        snapshot's blocks are dropped. Raises `CacheError` for a cache in use, blocks that are not
        there or ids of another number; nothing was changed then.
        """
        full = snapshot.blocks * snapshot.block_tokens
        if self.length or self.loaded_tokens < full:
            raise CacheError(
                f"a snapshot at position {snapshot.position} needs a fresh cache with {full} "
                f"tokens loaded, not one of {self.length} tokens with {self.loaded_tokens}"
            )
        if len(token_ids) != snapshot.position:
            raise CacheError(
                f"{len(token_ids)} token ids for a snapshot at position {snapshot.position}"
            )
        with self.changing():
            self.truncate_rows(full)
            self.reserve(snapshot.position)
            for spec, part in zip(self._specs, snapshot.sections, strict=True):
                # behind rows that may still be on their way, in memory that is there already
                self._rows[spec.layer, spec.role].append(part.rows)
            for rows, part in zip(self.windows, snapshot.windows, strict=True):
                rows.restore(part.start, snapshot.position, part.rows)
            for rows, part in zip(drafts if snapshot.drafts else (), snapshot.drafts, strict=False):
                rows.restore(part.start, snapshot.position, part.rows)
            for part in snapshot.pending:
                pending = np.ascontiguousarray(part.rows).view("<f4").astype(np.float32)
                values = torch.from_numpy(pending).to(self.device)
                self.open_groups[part.number].restore(snapshot.position, values)
            self._tokens.append(token_ids.astype(np.int32))
            self.length = snapshot.position

    def promise_blocks(self, blocks: int, block_tokens: int) -> list[Promise]:
        """Take blocks 0 … `blocks` − 1 as loaded though their bytes are still to come, section by
        section; for a cache without any. Whoever calls this MUST resolve every promise.

        Raises `CacheError` where the cache holds something.
        """
        if self.length or self.loaded_tokens:
            raise CacheError("blocks are promised to an empty cache only")
        promises = []
        for spec in self._specs:
            place = self._row_range(spec, blocks, block_tokens)
            memory = self._rows[spec.layer, spec.role].promise(place.start)
            done = self._promised[spec.layer, spec.role] = Future[None]()
            promises.append(Promise(memory, done))
        return promises

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on, at most `ROLLBACK_TOKENS_MAX` of them.

        Raises `CacheError` where the windows slid too far for that; the cache is unusable then.
        """
        self.check_usable()
        if not 0 <= length <= self.length:
            raise CacheError(f"can't cut a cache of {self.length} tokens to {length}")
        with self.changing():
            for window in self.windows:
                window.truncate(length)
            for group in self.open_groups.values():
                group.truncate(length)
            self.truncate_rows(length)
            self._tokens.truncate(length)
            self.length = length

    def truncate_rows(self, tokens: int) -> None:
        """Drop the global rows that stand behind the first `tokens` positions."""
        for spec in self._specs:
            if tokens // spec.ratio < len(self._rows[spec.layer, spec.role]):
                self.rows(spec).truncate(tokens // spec.ratio)

    def changing(self) -> "_Change":
        """Context in which the parts are out of step; leaving it by an error spoils the cache."""
        return _Change(self)

    def check_usable(self) -> None:
        """Raise `CacheError` after a computation on this cache has failed half-way."""
        if self._failure is not None:
            raise CacheError(
                f"a computation failed half-way on this cache ({self._failure}); start a new one"
            )

    def _spoil(self, failure: str) -> None:
        self._failure = failure

    def _row_range(self, spec: GlobalCache, block: int, block_tokens: int) -> slice:
        if block_tokens < 1 or block_tokens % self._config.group_tokens:
            raise CacheError(
                f"block_tokens {block_tokens} is not a multiple of the compression ratios "
                f"(least common multiple {self._config.group_tokens})"
            )
        rows = block_tokens // spec.ratio
        return slice(block * rows, (block + 1) * rows)

    def _section(
        self, i: int, block: int, block_tokens: int, data: Section
    ) -> Records | HostRecords:
        spec = self._specs[i]
        place = self._row_range(spec, block, block_tokens)
        is_tensor = isinstance(data, torch.Tensor)
        flat = data.reshape(-1) if is_tensor else np.frombuffer(data, np.uint8)
        if len(flat) != (place.stop - place.start) * spec.row_bytes:
            raise CacheError(
                f"section {i} (layer {spec.layer}, {spec.role}) of block {block} has {len(flat)} "
                f"bytes, not {(place.stop - place.start) * spec.row_bytes}"
            )
        if len(self.rows(spec)) != place.start:
            raise CacheError(
                f"block {block} is out of order: section {i} holds {len(self.rows(spec))} rows, "
                f"it begins at row {place.start}"
            )
        return flat.reshape(-1, spec.row_bytes)


def _window_part(kind: PartKind, number: int, window: WindowRows, config: ModelConfig) -> Part:
    """The last W records; a query needs W − 1 of them, a draft all."""
    count = min(config.window, window.end - window.start)
    return Part(kind, number, window.start, host(window.latest(count)))


class _Change:
    def __init__(self, cache: SequenceCache) -> None:
        self._cache = cache

    def __enter__(self) -> None:
        self._cache.check_usable()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._cache._spoil(repr(error))
