"""What the readers of a lease will want next, read from SSD while they use what they have.

A reader takes a long prefix in pieces, and between two of them the disk would stand still. So where
the reads of a lease follow one another in its order, the blocks behind them are loaded too: twice
what was read in a row so far, up to `migration.read_ahead_bytes_max`. It is a guess, so it takes
only what is free: it waits for no budget and goes past no full DRAM. A wrong guess has cost the
disk a read that nobody needed.
"""

from collections.abc import Sequence

from kvstore.block import Tier
from kvstore.store.driver import Driver
from kvstore.store.loads import Loads

_SSD = int(Tier.SSD)
_DRAM_SHARE = 8
"""Of a small DRAM, no more than one part in so many is filled on a guess."""


class ReadAhead:
    """See the module."""

    def __init__(self, driver: Driver, loads: Loads) -> None:
        self._driver, self._loads = driver, loads
        config = driver.config
        self._bytes_max = min(
            config.migration.read_ahead_bytes_max, config.dram.budget_bytes // _DRAM_SHARE
        )

    def follow(self, lease_id: int, rows: Sequence[int | None]) -> None:
        """Blocks of a lease are being read: load what comes next, if they are next themselves."""
        core = self._driver.core
        held = core.leases.get(lease_id, self._driver.now_s()).held
        first, last = rows[0], rows[-1]
        if not self._bytes_max or first is None or last is None or not held.rows:
            return
        # a lease holds a chain from one block on, so depth tells where in it a block stands
        at = core.index.depth[first] - core.index.depth[held.rows[0]]
        end = at + len(rows)
        if not 0 <= at < end <= len(held.rows) or (held.rows[at], held.rows[end - 1]) != (
            first,
            last,
        ):
            return
        reading = held.reading
        follows, reading.next = at == reading.next, end
        if not follows:
            reading.start, reading.ahead = at, end
            return
        most = self._bytes_max // core.namespaces.frame_bytes(held.number)
        window = min(most, 2 * (end - reading.start))
        # in large pieces: not before half of what is ahead has been asked for
        if reading.ahead - end > window // 2:
            return
        ahead = held.rows[max(reading.ahead, end) : end + window]
        reading.ahead = end + window
        wanted = [row for row in ahead if core.index.tiers[row] == _SSD]
        if wanted:
            self._loads.ahead(wanted)
