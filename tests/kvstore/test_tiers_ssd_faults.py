"""The log when the disk fails: full, broken, read-only, gone; simulated and for real."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.config import SsdConfig
from kvstore.errors import DiskError
from kvstore.testing.disk import History, SimDisk, fail_next, no_fault
from kvstore.testing.tiers_frames import (
    DESCRIPTOR,
    NAMESPACE_ID,
    key_of,
    load,
    make_frame,
    rows,
    store,
)
from kvstore.tiers.base import PAGE_BYTES, Recovered, WriteItem
from kvstore.tiers.frame import FrameTruncated, verify_frame
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.files import OsFileSystem
from kvstore.tiers.ssd.index import IndexChange

CONFIG = SsdConfig(budget_bytes=1 << 20, segment_bytes=64 << 10, free_floor_bytes=0)


def open_sim(disk: SimDisk, config: SsdConfig = CONFIG) -> tuple[SsdTier, Recovered]:
    return SsdTier.open(Path("/store"), config, files=disk, open_index=disk.open_index)


def fill(tier: SsdTier) -> int:
    """Store frames one by one until there is no room; how many there were."""
    number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    for i in range(1000):
        location = tier.place(PAGE_BYTES)
        if location is None:
            return i
        item = WriteItem(location, key_of(i), number, make_frame(key_of(i)))
        assert tier.write_batch([item]) == [None]
    raise AssertionError("the disk never filled")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize(
    ("what", "name"), [("pwrite", ".seg"), ("fdatasync", ".seg"), ("commit", ""), ("open", ".seg")]
)
def test_a_failed_batch_holds_nothing_and_costs_nothing_else(
    what: str, name: str, code: int
) -> None:
    disk = SimDisk()
    tier, _ = open_sim(disk)
    (kept,) = store(tier, [make_frame(key_of("kept"))])
    number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    live = tier.live_bytes
    frames = [make_frame(key_of(i)) for i in range(20)]
    items = []
    for i, frame in enumerate(frames):
        location = tier.place(len(frame))
        assert location is not None
        items.append(WriteItem(location, key_of(i), number, frame))
    disk.before = fail_next(what, code, name=name)
    with pytest.raises(DiskError, match=errno.errorcode[code]):
        tier.write_batch(items, removes=[kept.key])
    assert tier.live_bytes == live
    tier.check_integrity()
    disk.before = no_fault
    assert load(tier, kept.location, kept.length) == kept.frame
    stored = store(tier, frames)
    for s in stored:
        assert load(tier, s.location, s.length) == s.frame
    tier.close()
    tier, recovered = open_sim(disk)
    assert rows(recovered) == {s.key: (s.location, s.length) for s in [kept, *stored]}
    tier.close()


def test_a_segment_whose_sync_failed_takes_no_more_frames() -> None:
    disk = SimDisk()
    tier, _ = open_sim(disk)
    (a,) = store(tier, [make_frame(key_of("a"))])
    disk.before = fail_next("fdatasync", errno.EIO)
    with pytest.raises(DiskError, match=r"EIO.*kernel log"):
        store(tier, [make_frame(key_of("b"))])
    (c,) = store(tier, [make_frame(key_of("c"))])
    assert c.location.segment > a.location.segment
    assert tier.victim_segment() == a.location.segment


def test_a_read_error_is_its_own_items_only() -> None:
    disk = SimDisk()
    tier, _ = open_sim(disk)
    (a,) = store(tier, [make_frame(key_of("a"))])
    disk.before = fail_next("preadv", errno.EIO, name=".seg")
    with pytest.raises(DiskError, match=r"reading /store/segments/00000001\.seg failed.*EIO"):
        load(tier, a.location, a.length)
    assert load(tier, a.location, a.length) == a.frame


def test_a_full_disk_is_a_clear_error_and_room_lets_it_go_on() -> None:
    disk = SimDisk(capacity_bytes=150_000)
    tier, _ = open_sim(disk)
    assert fill(tier) > 10
    disk.capacity_bytes = 1 << 30
    assert tier.place(PAGE_BYTES) is None
    tier.refresh()
    store(tier, [make_frame(key_of("more"))])


def test_a_disk_that_others_filled_is_enospc_with_advice() -> None:
    disk = SimDisk()
    tier, _ = open_sim(disk)
    tier.place(PAGE_BYTES)
    number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    location = tier.place(PAGE_BYTES)
    assert location is not None
    disk.capacity_bytes = 0
    with pytest.raises(DiskError, match=r"ENOSPC.*free some space"):
        tier.write_batch([WriteItem(location, key_of(1), number, make_frame(key_of(1)))])


def test_the_free_floor_is_not_crossed() -> None:
    config = CONFIG.model_copy(update={"free_floor_bytes": 500_000})
    disk = SimDisk(capacity_bytes=800_000)
    tier, _ = open_sim(disk, config)
    assert fill(tier) > 10
    assert 500_000 <= disk.free_bytes(Path("/store")) < 550_000


def test_a_full_disk_at_the_start_is_a_clear_error() -> None:
    with pytest.raises(DiskError, match=r"opening the store in /store failed.*ENOSPC.*free some"):
        open_sim(SimDisk(capacity_bytes=0))


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOMEM, r"ENOMEM.*lower dram\.budget_bytes or ssd\.index_map_bytes_max"),
        (errno.ENFILE, r"ENFILE.*fs\.file-max"),
        (errno.EEXIST, r"EEXIST.*choose a directory"),
        (errno.ENOTDIR, r"ENOTDIR.*choose a directory"),
    ],
)
def test_an_error_at_the_start_says_what_to_do(number: int, advice: str) -> None:
    disk = SimDisk()
    disk.before = fail_next("mkdir", number)
    with pytest.raises(DiskError, match=advice) as caught:
        open_sim(disk)
    assert "kernel log" not in str(caught.value)


@pytest.mark.parametrize("what", ["listdir", "open", "open_index", "disk_bytes", "free_bytes"])
def test_a_failed_open_leaves_everything_free(what: str) -> None:
    disk = SimDisk()
    tier, _ = open_sim(disk)
    store(tier, [make_frame(key_of(1))])
    tier.close()
    disk.before = fail_next(what, errno.EIO)
    with pytest.raises(DiskError, match="EIO"):
        open_sim(disk)
    tier, recovered = open_sim(disk)
    assert recovered.keys == [key_of(1)]
    tier.close()


def segment_sizes(disk: SimDisk) -> dict[str, int]:
    names = disk.state.names
    return {n: len(disk.state.file(i)) for n, i in names.items() if n.endswith(".seg")}


@pytest.mark.parametrize("index_lost", [False, True])
@pytest.mark.parametrize("skip", [0, 1, 2, 3])
def test_a_bad_sector_while_opening_costs_what_it_hits_and_deletes_nothing(
    skip: int, index_lost: bool
) -> None:
    """The read after `skip` others fails: a segment's header, or a frame of the unfinished tail."""
    disk = SimDisk()
    tier, _ = open_sim(disk)
    stored = store(tier, [make_frame(key_of(i)) for i in range(20)])
    disk.before = fail_next("commit", errno.EIO)
    with pytest.raises(DiskError):
        # a batch that takes something away is not acknowledged before its commit
        store(tier, [make_frame(key_of(i)) for i in range(20, 24)], removes=[key_of("unknown")])
    # killed: a clean stop would give up what a failed batch left
    disk = SimDisk(disk.state)
    if index_lost:
        disk.unlink(Path("/store/index.lmdb/data.mdb"))
    before = segment_sizes(disk)
    fail, reads = fail_next("preadv", errno.EIO, name=".seg"), 0

    def later(what: str, path: Path) -> None:
        nonlocal reads
        reads += what == "preadv" and path.suffix == ".seg"
        if reads > skip:
            fail(what, path)

    disk.before = later
    tier, recovered = open_sim(disk)
    assert recovered.notes
    assert {s.key for s in stored} <= set(recovered.keys) or index_lost
    for key, (location, length) in rows(recovered).items():
        assert verify_frame(load(tier, location, length), key) is None
    (new,) = store(tier, [make_frame(key_of("new"))])
    tier.close()
    after = segment_sizes(disk)
    assert all(after[name] >= size for name, size in before.items())
    tier, recovered = open_sim(disk)
    assert new.key in recovered.keys
    tier.close()


def test_a_failed_open_leaves_lmdb_free(tmp_path: Path) -> None:
    class Failing(OsFileSystem):
        def free_bytes(self, path: Path) -> int:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(DiskError, match="EIO"):
        SsdTier.open(tmp_path, CONFIG, files=Failing())
    SsdTier.open(tmp_path, CONFIG)[0].close()


def test_the_kernel_says_enospc_and_the_log_goes_on(tmp_path: Path) -> None:
    """The real path of a full disk, made with a limit on file size."""
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from kvstore.config import SsdConfig; from kvstore.errors import DiskError\n"
        "from kvstore.tiers.ssd import SsdTier\n"
        "from kvstore.testing.tiers_frames import *\n"
        "c = SsdConfig(budget_bytes=1 << 22, segment_bytes=1 << 20, free_floor_bytes=0)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "tier, _ = SsdTier.open(Path(sys.argv[1]), c)\n"
        "kept = store(tier, [make_frame(key_of('kept'))])[0]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 1 << 30))\n"
        "try:\n"
        "    store(tier, [make_frame(key_of(i), (9000,)) for i in range(20)])\n"
        "    raise SystemExit('no error')\n"
        "except DiskError as e:\n"
        "    assert 'EFBIG' in str(e), e\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))\n"
        "assert load(tier, kept.location, kept.length) == kept.frame\n"
        "more = store(tier, [make_frame(key_of(i)) for i in range(20)])\n"
        "tier.check_integrity(); tier.close()\n"
        "tier, r = SsdTier.open(Path(sys.argv[1]), c)\n"
        "assert len(r.keys) == 21, len(r.keys)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=True)


def test_lmdb_recovers_from_a_commit_that_found_no_room(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"index_map_bytes_max": 1 << 20, "budget_bytes": 1 << 30})
    tier, _ = SsdTier.open(tmp_path, config)
    (kept,) = store(tier, [make_frame(key_of("kept"))])
    descriptor = b"x" * 600_000
    tier.put_namespace(key_of(1), descriptor)
    with pytest.raises(DiskError, match=r"index\.lmdb.*ENOSPC"):
        tier.put_namespace(key_of(2), descriptor)
    assert load(tier, kept.location, kept.length) == kept.frame
    (more,) = store(tier, [make_frame(key_of("more"))])
    tier.close()
    tier, recovered = SsdTier.open(tmp_path, config)
    assert {kept.key, more.key} == set(recovered.keys)
    tier.close()


def test_reads_go_on_while_segments_are_dropped(tmp_path: Path) -> None:
    tier, _ = SsdTier.open(tmp_path, CONFIG)
    stored = store(tier, [make_frame(key_of(i)) for i in range(16)])
    first = [s for s in stored if s.location.segment == 1]
    tier.remove([s.key for s in first])
    for s in first:
        tier.mark_dead(s.location, s.length)
    with tier._segments.use(1) as handle:
        tier.drop_segment(1)
        buffer = memoryview(bytearray(PAGE_BYTES))
        assert os.fstat(handle).st_nlink == 0
        assert OsFileSystem().size(handle) > 0
        del buffer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    with pytest.raises(FrameTruncated, match="is gone"):
        load(tier, first[0].location, PAGE_BYTES)
    tier.close()


def power_loss(disk: SimDisk) -> SimDisk:
    """What is left of a disk that loses whatever it may lose."""
    history = History(disk.log)
    cut = len(disk.log)
    return SimDisk(history.state(cut, dict.fromkeys(history.unsettled(cut))))


def test_a_batch_is_durable_before_the_index_knows_it() -> None:
    disk = SimDisk()
    disk.late = True
    tier, _ = open_sim(disk)
    tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    commits = sum(op.what == "commit" for op in disk.log)
    stored = [*store(tier, [make_frame(key_of(0))]), *store(tier, [make_frame(key_of(1))])]
    assert sum(op.what == "commit" for op in disk.log) == commits, "it came too soon to tell"
    _, recovered = open_sim(power_loss(disk))
    assert rows(recovered) == {s.key: (s.location, s.length) for s in stored}
    assert recovered.adopted == 2
    tier.remove([key_of(0)])
    _, recovered = open_sim(power_loss(disk))
    assert set(rows(recovered)) == {key_of(1)}, "a removal is durable on return, all before it too"
    assert recovered.adopted == 0


def test_a_batch_placed_before_the_index_s_mark_is_committed_before_it_is_acknowledged() -> None:
    """The next open looks for unknown frames behind the mark alone."""
    disk = SimDisk()
    disk.late = True
    tier, _ = open_sim(disk)
    number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    frame = make_frame(key_of("placed first"))
    location = tier.place(len(frame))
    assert location is not None
    (second,) = store(tier, [make_frame(key_of("written first"))])
    tier.remove([key_of("nothing")])
    assert tier.write_batch([WriteItem(location, key_of("placed first"), number, frame)]) == [None]
    _, recovered = open_sim(power_loss(disk))
    assert set(recovered.keys) == {key_of("placed first"), second.key}


def test_an_index_that_fails_behind_durable_batches_is_told_and_made_good() -> None:
    disk = SimDisk()
    tier, _ = open_sim(disk)
    tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    disk.before = fail_next("commit", errno.EIO, times=2)
    (first,) = store(tier, [make_frame(key_of(0))])
    live = tier.live_bytes
    with pytest.raises(DiskError, match="EIO"):
        store(tier, [make_frame(key_of(1))])
    assert tier.live_bytes == live
    tier.check_integrity()
    (third,) = store(tier, [make_frame(key_of(2))])
    tier.close()
    tier, recovered = open_sim(disk)
    assert rows(recovered) == {s.key: (s.location, s.length) for s in (first, third)}
    assert recovered.adopted == 0
    tier.mark_dead(first.location, first.length)
    tier.close()


def test_a_store_whose_index_fails_to_the_end_closes_and_loses_nothing() -> None:
    disk = SimDisk()
    tier, _ = open_sim(disk)
    tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    disk.before = fail_next("commit", errno.ENOSPC, times=1000)
    (kept,) = store(tier, [make_frame(key_of(0))])
    tier.close()
    disk.before = no_fault
    _, recovered = open_sim(disk)
    assert rows(recovered) == {kept.key: (kept.location, kept.length)}


def test_a_commit_said_to_fail_that_did_not_leaves_right_counts() -> None:
    """LMDB may report an error after the change is in the file; then the change comes again."""
    disk = SimDisk()
    tier, _ = open_sim(disk)
    tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    index, fail = tier._writer._index, [True]
    commit = index.commit

    def lying(change: IndexChange) -> list[bytes]:
        displaced = commit(change)
        if fail:
            fail.pop()
            raise OSError(errno.EIO, "Input/output error")
        return displaced

    index.commit = lying  # type: ignore[method-assign]
    store(tier, [make_frame(key_of(0))])
    store(tier, [make_frame(key_of(1))])
    tier.check_integrity()
    assert tier._writer._entries[1] == 2
    tier.close()


def test_an_outstanding_commit_that_is_taken_back_leaves_right_counts() -> None:
    disk = SimDisk()
    tier, _ = open_sim(disk)
    tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    (kept,) = store(tier, [make_frame(key_of("kept"), (50_000,))])
    tier.refresh()
    disk.before = fail_next("commit", errno.EIO, times=2)
    (old,) = store(tier, [make_frame(key_of("old"))])
    with pytest.raises(DiskError):
        tier.remove([old.key])
    disk.before = no_fault
    tier.remove([old.key, kept.key])
    tier.check_integrity()
    assert not +tier._writer._entries
    for s in (kept, old):
        tier.mark_dead(s.location, s.length)
    store(tier, [make_frame(key_of("next"), (60_000,))])
    tier.drop_segment(1)
    tier.close()


@pytest.mark.parametrize("end", ["close", "kill", "mark and kill"])
@pytest.mark.parametrize("stage", ["fdatasync", "commit"])
def test_frames_of_a_failed_batch_do_not_come_back(stage: str, end: str) -> None:
    """Whole frames behind the index's mark are adopted by the next start, unless they were given
    up: after anything else was committed, or a clean stop, they stay gone."""
    disk = SimDisk()
    tier, _ = open_sim(disk)
    number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    (kept,) = store(tier, [make_frame(key_of("kept"))])
    tier.refresh()
    frame = make_frame(key_of("lost"))
    location = tier.place(len(frame))
    assert location is not None
    disk.before = fail_next(stage, errno.EIO, times=10)
    with pytest.raises(DiskError):
        # a removal makes the commit part of the call
        tier.write_batch([WriteItem(location, key_of("lost"), number, frame)], [key_of("nothing")])
    disk.before = no_fault
    if end == "close":
        tier.close()
    elif end == "mark and kill":
        tier.refresh()
    history = History(disk.log)
    after = SimDisk(history.state(len(history.ops)))
    tier, recovered = open_sim(after)
    expected = [kept.key, key_of("lost")] if end == "kill" else [kept.key]
    assert sorted(recovered.keys) == sorted(expected)
    if end != "kill":
        assert recovered.notes == []
    tier.close()
