"""What becomes of blocks whose write failed, and which were evicted before it was tried again."""

import errno
from itertools import pairwise

import pytest
from store_harness import HandDrivenStore, store_config

from kvstore.block import BlockPut
from kvstore.namespace import Layout
from kvstore.testing.blocks import TINY_LAYOUT, chain, tiny_namespace
from kvstore.testing.disk import SimDisk, fail_next, no_fault
from kvstore.tiers.ssd.index import IndexChange

NS = tiny_namespace()


def turns(store: HandDrivenStore) -> None:
    for _ in range(20):
        store.clock.advance(5.0)
        store.log_turn()
    store.core.check_integrity()


def killed(store: HandDrivenStore) -> HandDrivenStore:
    """The store as the next process finds it."""
    return HandDrivenStore(store.config, SimDisk(store.disk.state))


def failed_put(what: str) -> tuple[HandDrivenStore, bytes, list[BlockPut], list[BlockPut]]:
    """A store with three sound blocks, and three whose frames are whole on the disk though their
    write failed."""
    store = HandDrivenStore(store_config())
    ns = store.core.open_namespace(NS)
    sound = chain(ns, TINY_LAYOUT, [1, 2, 3])
    store.put(ns, sound)
    store.flush()
    failed = chain(ns, TINY_LAYOUT, [7, 8, 9])
    store.put(ns, failed)
    store.disk.before = fail_next(what, errno.EIO)
    store.log_turn()
    assert store.core.lane is not None
    assert store.core.lane.degraded
    store.disk.before = no_fault
    return store, ns, sound, failed


def hits(store: HandDrivenStore, ns: bytes, blocks: list[BlockPut]) -> int:
    store.core.open_namespace(NS)
    return store.core.match(ns, [block.key for block in blocks]).hit_blocks


def test_an_evicted_block_whose_write_failed_stays_gone_once_the_disk_works() -> None:
    store, ns, sound, failed = failed_put("fdatasync")
    assert store.core.evict(ns, [block.key for block in failed], None) == 3
    turns(store)
    again = killed(store)
    assert (hits(again, ns, sound), hits(again, ns, failed)) == (3, 0)


def test_until_then_a_crash_may_bring_it_back_with_its_right_bytes() -> None:
    """Eviction makes room and erases nothing; what comes back is what was put."""
    store, ns, sound, failed = failed_put("fdatasync")
    assert store.core.evict(ns, [block.key for block in failed], None) == 3
    again = killed(store)
    assert (hits(again, ns, sound), hits(again, ns, failed)) == (3, 3)
    for block in failed:
        assert again.read(NS, ns, block.key) == block.sections


def test_a_block_that_stayed_is_written_again() -> None:
    store, ns, _, failed = failed_put("fdatasync")
    turns(store)
    again = killed(store)
    assert hits(again, ns, failed) == 3


@pytest.mark.parametrize("evicted", [True, False])
def test_a_commit_said_to_fail_that_did_not_brings_nothing_back(evicted: bool) -> None:
    store = HandDrivenStore(store_config())
    assert store.ssd is not None
    index = store.ssd._writer._index
    commit, lies = index.commit, []

    def lying(change: IndexChange) -> list[bytes]:
        displaced = commit(change)
        if lies:
            lies.pop()
            raise OSError(errno.EIO, "Input/output error")
        return displaced

    index.commit = lying  # type: ignore[method-assign]
    ns = store.core.open_namespace(NS)
    old, new = chain(ns, TINY_LAYOUT, [1]), chain(ns, TINY_LAYOUT, [2])
    store.put(ns, old)
    store.flush()
    store.put(ns, new)
    # a removal in the same job, so that the commit is part of it
    store.core.evict(ns, [old[0].key], None)
    lies.append(True)
    store.log_turn()
    assert store.core.lane is not None
    assert store.core.lane.degraded
    if evicted:
        assert store.core.evict(ns, [new[0].key], None) == 1
    turns(store)
    again = killed(store)
    assert (hits(again, ns, old), hits(again, ns, new)) == (0, 0 if evicted else 1)
    again.core.check_integrity()


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("what", ["pwrite", "fdatasync"])
def test_a_disk_that_takes_no_frame_is_tried_less_and_less_often(what: str, error: int) -> None:
    """Deleting the segments that failed appends filled works all the while, and proves nothing."""
    layout = Layout(TINY_LAYOUT.sections, 16)
    store = HandDrivenStore(store_config(**{"ssd.segment_bytes": "128KiB"}))
    ns = store.core.open_namespace(tiny_namespace(layout=layout))
    store.flush()
    blocks = chain(ns, layout, [1, 2, 3, 4, 5, 6])
    store.put(ns, blocks)

    def refuse(op: str, path: str) -> None:
        if op == what:
            raise OSError(error, "refused")

    store.disk.before = refuse
    lane, tried_s = store.core.lane, []
    assert lane is not None
    while store.now < 3600.0:
        job = store.begin_log()
        if job is not None:
            if job.appends:
                tried_s.append(store.now)
            store.finish_log(job)
            assert lane.degraded
        store.clock.advance(0.25)
    waits = [after - before for before, after in pairwise(tried_s)]
    assert len(waits) > 100
    assert all(later > 0.9 * sooner for sooner, later in pairwise(waits))
    assert store.config.migration.retry_s_max <= waits[-1] < 2 * store.config.migration.retry_s_max
    store.disk.before = no_fault
    turns(store)
    assert not lane.degraded
    again = killed(store)
    again.core.open_namespace(tiny_namespace(layout=layout))
    assert again.core.match(ns, [block.key for block in blocks]).hit_blocks == len(blocks)
