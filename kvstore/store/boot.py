"""What the log held at open becomes the index, at once and column by column."""

import ctypes
import logging
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.block import Tier
from kvstore.errors import InvalidRequest
from kvstore.index import BlockIndex, BulkRows
from kvstore.namespace import Namespace, namespace_id
from kvstore.store.core import Core
from kvstore.tiers.base import PAGE_BYTES, Location, NamespaceRow, Recovered
from kvstore.tiers.frame import Kind

_log = logging.getLogger(__name__)
_LEVEL_ROWS_MIN = 32
"""Rows per depth from which on NumPy, a depth at a time, is the faster way."""


def load(core: Core, recovered: Recovered, secret: bytes) -> None:
    """Fill an empty core. What can't be a block of its namespace or contradicts its chain is taken
    out of the log, counted as corrupt and logged.

    The policy of the SSD gets the blocks in the order of their ages, which the index keeps. What it
    had learnt beyond that (how often and at what pace each was used) starts anew.

    Rows stay in the order of the log, which is that of writing, so that a chain's rows and keys lie
    close together in memory: looking one up is several times faster then.
    """
    number = _load_namespaces(core, recovered.namespaces, secret)
    good = _well_formed(core, recovered, number)
    # a slice copies nothing
    chosen = slice(None) if good.all() else good
    rows = BulkRows(
        keys=recovered.packed_keys[chosen],
        parents=recovered.parents[chosen],
        namespace=number[recovered.namespace_no[chosen]],
        depth=recovered.depth[chosen],
        segment=recovered.segment[chosen],
        page=recovered.offset[chosen] // PAGE_BYTES,
        stored_bytes=recovered.stored_length[chosen],
        created_wall_s=recovered.created_wall_s[chosen],
    )
    contradicting = core.index.load(rows, Tier.SSD)
    order = coldest_first(core.index)
    core.residency.ssd_policy.load(order)
    if len(order):
        _log.info(
            "%d blocks stand in the order of their ages; their uses are forgotten", len(order)
        )
    _discard(core, recovered, np.flatnonzero(~good))
    _discard(core, recovered, np.flatnonzero(good)[contradicting])


def _load_namespaces(core: Core, rows: list[NamespaceRow], secret: bytes) -> npt.NDArray[np.int64]:
    """The core's number by the tier's; −1 where there is none."""
    number = np.full(1 + max((row.number for row in rows), default=0), -1, np.int64)
    for row in rows:
        number[row.number] = core.namespaces.add(row.namespace_id, _descriptor(row, secret))
    return number


def _descriptor(row: NamespaceRow, secret: bytes) -> Namespace | None:
    if not row.descriptor:
        return None
    try:
        namespace = Namespace.from_json(row.descriptor)
    except InvalidRequest as e:
        _log.warning("namespace %s is of no use until it is opened: %s", row.namespace_id.hex(), e)
        return None
    if namespace_id(namespace, secret) != row.namespace_id:
        _log.warning("namespace %s has a descriptor of another", row.namespace_id.hex())
        return None
    return namespace


def _well_formed(
    core: Core, recovered: Recovered, number: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    expected = np.array([core.namespaces.frame_bytes(n) for n in range(len(core.namespaces))] + [0])
    tier_number = np.minimum(recovered.namespace_no, len(number) - 1)
    ours = np.where(recovered.namespace_no < len(number), number[tier_number], -1)
    size = expected[ours]
    fits: npt.NDArray[np.bool_] = (
        (recovered.kind == Kind.BLOCK)
        & (ours >= 0)
        & ((size == 0) | (recovered.stored_length == size))
        & (recovered.offset % PAGE_BYTES == 0)
    )
    return fits


def _discard(core: Core, recovered: Recovered, entries: npt.NDArray[Any]) -> None:
    ssd = core.residency.ssd
    assert ssd is not None
    for i in entries.tolist():
        key = recovered.packed_keys[i].tobytes()
        place = Location(int(recovered.segment[i]), int(recovered.offset[i]))
        ssd.mark_dead(place, int(recovered.stored_length[i]))
        core.residency.removes[key] = None
        core.metrics.add("corrupt_ssd_blocks")
        _log.warning("quarantined block %s: its index entry contradicts its chain", key.hex())


def return_memory() -> None:
    """Give what loading took for a moment back to the system; malloc alone would keep it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def coldest_first(index: BlockIndex) -> npt.NDArray[np.int64]:
    """READY rows in an order for a policy: by the time of birth of the youngest block below them,
    so that a parent is never colder than a child; of equal ones in a chain, the deeper first."""
    rows = np.flatnonzero(index.view("tiers"))
    depth = index.view("depth")[rows].astype(np.int32)
    deepest_first = np.argsort(-depth, kind="stable")
    born = _youngest_below(index, rows[deepest_first], depth[deepest_first])[rows]
    # what lies in a row, one behind the other in a chain and equally young, is sorted as one
    behind = (index.view("parent")[rows[1:]] == rows[:-1]) & (rows[1:] == rows[:-1] + 1)
    cut = ~behind | (born[1:] != born[:-1])
    starts = np.concatenate((np.zeros(min(1, len(rows)), np.int64), np.flatnonzero(cut) + 1))
    ends = np.append(starts[1:], len(rows))[: len(starts)]
    order = np.lexsort((-depth[starts], born[starts]))
    lengths = (ends - starts)[order]
    before = np.cumsum(lengths) - lengths
    return rows[np.repeat(ends[order] - 1 + before, lengths) - np.arange(len(rows))]


def _youngest_below(
    index: BlockIndex, rows: npt.NDArray[np.int64], depth: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    """By row number, the latest time of birth in the subtree; `rows` come deepest first."""
    born = index.view("created_wall_s").copy()
    above = index.view("parent")[rows].astype(np.int64)
    rows, depth, above = rows[above >= 0], depth[above >= 0], above[above >= 0]
    starts = np.flatnonzero(np.diff(depth, prepend=-1))
    if not len(rows) or len(rows) < _LEVEL_ROWS_MIN * len(starts):
        return _youngest_below_by_row(born, rows, above)
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        np.maximum.at(born, above[start:stop], born[rows[start:stop]])
    return born


def _youngest_below_by_row(
    born: npt.NDArray[np.float64], rows: npt.NDArray[np.int64], above: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    times: list[float] = born.tolist()
    for row, parent in zip(rows.tolist(), above.tolist(), strict=True):
        if times[row] > times[parent]:
            times[parent] = times[row]
    return np.array(times)
