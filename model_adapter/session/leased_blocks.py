"""Blocks of a lease into a cache, each from the nearest place where the store has it.

What the store's HBM holds, on the device where the cache is, is copied from there to the cache and
does not pass the host; the rest comes by way of the host. Bytes of HBM may become another block's
while they are copied, which their generation tells afterwards: so only when the copies are done the
store is asked, and what was overtaken is read again by way of the host.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from kvstore import Client, Lease, Outcome, Tier
from model_adapter.cache import SequenceCache
from model_adapter.devices import finish, staging
from model_adapter.errors import SectionsLost
from model_adapter.records import HostRecords, Records, fill

_KIND_OF = {"cpu": "simulated", "cuda": "cuda"}
"""Which of the store's devices a cache's device is. The simulated one is host memory."""


class LeasedBlocks:
    """Reads for caches on `device`, in blocks of `block_tokens`.

    HBM is used where the client has opened it (`Client.open_hbm`); a cache on a GPU opens it.
    Errors are the client's.
    """

    def __init__(self, client: Client, block_tokens: int, device: torch.device) -> None:
        self._client = client
        self._block_tokens = block_tokens
        self._device = device

    def open(self) -> None:
        """Let leases from now on know what lies in HBM, for a cache on a GPU."""
        if self._device.type == "cuda":
            self._client.open_hbm()

    def all_in_hbm(self, lease: Lease) -> bool:
        """Whether all of a lease's blocks can be had from HBM, as far as can be told before."""
        held = all(Tier.HBM in tier for tier in lease.match.residency[: lease.blocks])
        return held and self._shown(lease, lease.keys[:1], [0])[0] is not None

    def load(
        self, lease: Lease, keys: Sequence[bytes], cache: SequenceCache, first: int
    ) -> list[Tier]:
        """Append blocks as `first` and following, up to the first that is not there; the tiers of
        those that came."""
        shown = self._shown(lease, keys)
        tiers = self._append(lease, keys, shown, cache, first)
        from_hbm = [i for i in range(len(tiers)) if shown[i] is not None]
        overtaken = set(from_hbm).difference(self._intact(lease, keys, from_hbm))
        if not overtaken:
            return tiers
        good = min(overtaken)
        cache.truncate_rows((first + good) * self._block_tokens)
        rest = keys[good:]
        again = self._append(lease, rest, [None] * len(rest), cache, first + good)
        return tiers[:good] + again

    def _append(
        self,
        lease: Lease,
        keys: Sequence[bytes],
        shown: Sequence[Sequence[Records | HostRecords] | None],
        cache: SequenceCache,
        first: int,
    ) -> list[Tier]:
        """Append what is shown, and read the rest."""
        wanted = [key for key, sections in zip(keys, shown, strict=True) if sections is None]
        read = iter(self._client.read(lease, wanted) if wanted else [])
        tiers: list[Tier] = []
        for sections in shown:
            block = first + len(tiers)
            if sections is not None:
                cache.load_block(block, self._block_tokens, sections)
                tiers.append(Tier.HBM)
                continue
            data = next(read)
            if data.outcome is not Outcome.HIT:
                break
            cache.load_block(block, self._block_tokens, data.sections)
            tiers.append(data.tier)
        return tiers

    def load_section(
        self, lease: Lease, keys: Sequence[bytes], number: int, first: int, rows: Records
    ) -> None:
        """Section `number` of blocks into `rows`, uint8 [len(keys) × rows of one, row bytes].

        `first`: number of the first block, for the error. Raises `SectionsLost` where one is not
        there any more.
        """
        parts = rows.unflatten(0, (len(keys), -1))
        shown = self._shown(lease, keys, [number])
        from_hbm = [i for i, sections in enumerate(shown) if sections is not None]
        for i in from_hbm:
            fill(parts[i], shown[i][0].reshape(parts[i].shape))
        good = set(self._intact(lease, keys, from_hbm))
        for start, stop in _runs([i for i in range(len(keys)) if i not in good]):
            self._read_section(lease, keys[start:stop], number, first + start, parts[start:stop])

    def _intact(
        self, lease: Lease, keys: Sequence[bytes], from_hbm: Sequence[int]
    ) -> Sequence[int]:
        """Which of the blocks that are being copied out of HBM stayed there until the end."""
        if not from_hbm:
            return []
        finish(self._device)
        if self._client.intact(lease, [keys[i] for i in from_hbm]):
            return from_hbm
        return [i for i in from_hbm if self._client.intact(lease, [keys[i]])]

    def _read_section(
        self, lease: Lease, keys: Sequence[bytes], number: int, first: int, rows: Records
    ) -> None:
        memory = rows if rows.device.type == "cpu" else staging(rows.shape)
        into = memory.numpy().reshape(-1)
        for i, block in enumerate(self._client.read(lease, keys, [number], into)):
            if block.outcome is not Outcome.HIT:
                raise SectionsLost(
                    f"section {number} of block {first + i} is not there any more, or was damaged"
                )
        if memory is not rows:
            rows.copy_(memory)

    def _shown(
        self, lease: Lease, keys: Sequence[bytes], sections: Sequence[int] | None = None
    ) -> list[list[Records | HostRecords] | None]:
        """Sections where they lie in HBM, None for a block that is not on the cache's device."""
        kind = _KIND_OF[self._device.type]
        return [
            list(map(_in_place, block.sections))
            if block is not None and block.kind == kind
            else None
            for block in self._client.view_hbm(lease, keys, sections)
        ]


def _in_place(section: Any) -> Records | HostRecords:
    """A CuPy array as torch has it, without a copy; the simulated device's is the host's."""
    return section if isinstance(section, np.ndarray) else torch.from_dlpack(section)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as runs [start, stop)."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1] + 1
