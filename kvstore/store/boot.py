"""What the log held at open becomes the index, at once and column by column."""

import logging
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


def load(core: Core, recovered: Recovered, secret: bytes) -> None:
    """Fill an empty core. What can't be a block of its namespace or contradicts its chain is taken
    out of the log, counted as corrupt and logged."""
    number = _load_namespaces(core, recovered.namespaces, secret)
    good = _well_formed(core, recovered, number)
    chosen = np.flatnonzero(good)
    everything = len(chosen) == len(good)
    keys = recovered.keys if everything else [recovered.keys[i] for i in chosen.tolist()]
    rows = BulkRows(
        keys=keys,
        parents=recovered.parents[chosen].tolist(),
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
    _discard(core, recovered, np.flatnonzero(~good))
    _discard(core, recovered, chosen[contradicting])


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
        key = recovered.keys[i]
        place = Location(int(recovered.segment[i]), int(recovered.offset[i]))
        ssd.mark_dead(place, int(recovered.stored_length[i]))
        core.residency.removes[key] = None
        core.metrics.add("corrupt_ssd_blocks")
        _log.warning("quarantined block %s: its index entry contradicts its chain", key.hex())


def coldest_first(index: BlockIndex) -> npt.NDArray[np.int64]:
    """READY rows in an order for a policy: by the time of birth of the youngest block below them,
    so that a parent is never colder than a child; equal ones, the deeper first."""
    rows = np.flatnonzero(index.view("tiers"))
    born: list[float] = index.created_wall_s.tolist()
    depth = index.view("depth")[rows].astype(np.int64)
    parent = index.parent
    for row in rows[np.argsort(-depth, kind="stable")].tolist():
        above = parent[row]
        if above >= 0 and born[row] > born[above]:
            born[above] = born[row]
    order = np.lexsort((-depth, np.array(born)[rows]))
    return rows[order]
