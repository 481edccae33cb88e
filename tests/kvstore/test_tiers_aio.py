"""Many reads at a time: the kernel's queue gives what plain reads give."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from kvstore.config import SsdConfig
from kvstore.testing.tiers_frames import key_of, make_frame, store
from kvstore.tiers.base import PAGE_BYTES, Location, ReadItem
from kvstore.tiers.frame import verify_frame
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.aio import AioUnavailable, Queue, QueuePool, Transfer
from kvstore.tiers.ssd.files import OsFileSystem, aligned_buffer

PAGES = 200


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def handle(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    files = OsFileSystem()
    if request.param and not files.direct_works(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    path = tmp_path / "f"
    path.write_bytes(contents())
    handle = files.open(path, direct=request.param)
    yield handle
    files.close(handle)


def contents() -> bytes:
    return Random(0).randbytes(PAGES * PAGE_BYTES)


def transfers(handle: int, count: int, seed: int = 0) -> list[Transfer]:
    """Reads of one to four buffers of one to three pages, anywhere; some past the end."""
    random = Random(seed)
    made = []
    for _ in range(count):
        buffers = [
            aligned_buffer(random.randint(1, 3) * PAGE_BYTES) for _ in range(random.randint(1, 4))
        ]
        offset = random.randrange(PAGES) * PAGE_BYTES
        made.append(Transfer(handle, buffers, offset, sum(map(len, buffers))))
    return made


def run(reads: list[Transfer], depth: int) -> dict[int, int | OSError]:
    ended: dict[int, int | OSError] = {}

    def done(position: int, result: int | OSError) -> None:
        assert position not in ended, "told twice"
        ended[position] = result

    OsFileSystem().preadv_many(reads, depth, done)
    return ended


@pytest.mark.parametrize("depth", [1, 2, 7, 64])
def test_every_read_gives_the_file_s_bytes(handle: int, depth: int) -> None:
    data = contents()
    reads = transfers(handle, 90)
    ended = run(reads, depth)
    assert sorted(ended) == list(range(90))
    for position, read in enumerate(reads):
        expected = data[read.offset : read.offset + sum(map(len, read.buffers))]
        assert ended[position] == len(expected)
        assert b"".join(read.buffers)[: len(expected)] == expected


def test_an_error_is_one_read_s_and_not_its_neighbours(handle: int) -> None:
    reads = transfers(handle, 30)
    spoilt = os.open("/dev/null", os.O_WRONLY)
    reads[7] = reads[7]._replace(handle=spoilt)
    reads[20] = reads[20]._replace(handle=spoilt)
    try:
        ended = run(reads, 8)
    finally:
        os.close(spoilt)
    wrong = {i: r.errno for i, r in ended.items() if isinstance(r, OSError)}
    assert wrong == {7: errno.EBADF, 20: errno.EBADF}
    assert len(ended) == 30


def test_what_is_under_way_ends_before_an_exception_of_the_caller_s_passes(handle: int) -> None:
    reads = transfers(handle, 40)
    ended = []

    def done(position: int, result: int | OSError) -> None:
        ended.append(position)
        if len(ended) == 5:
            raise RuntimeError("enough")

    queue = Queue(16)
    with pytest.raises(RuntimeError, match="enough"):
        queue.read(reads, 16, done)
    # the queue is empty: the next one's reads are all that it is told of
    assert len(ended) == 5
    again: list[int] = []
    queue.read(reads[:3], 16, lambda position, result: again.append(position))
    assert sorted(again) == [0, 1, 2]


def test_no_more_are_under_way_than_asked_for(handle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, started = Queue(32), []
    start = queue._start

    def counting(at: int, count: int, under_way: int) -> tuple[int, OSError | None]:
        started.append(count + under_way)
        return start(at, count, under_way)

    monkeypatch.setattr(queue, "_start", counting)
    queue.read(transfers(handle, 60), 5, lambda position, result: None)
    assert max(started) == 5


def test_threads_have_queues_of_their_own(handle: int) -> None:
    pool, data = QueuePool(), contents()
    wrong = []

    def work(seed: int) -> None:
        for round_ in range(10):
            reads = transfers(handle, 20, 100 * seed + round_)
            if not pool.read(reads, 8, lambda position, result: None):
                wrong.append("unavailable")
            wrong.extend(
                read.offset
                for read in reads
                if not data[read.offset :].startswith(bytes(read.buffers[0]))
                and read.offset + len(read.buffers[0]) <= len(data)
            )

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 1 <= len(pool._free) <= 4


def test_without_the_kernel_s_queue_plain_reads_do(
    handle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Queue, depth: int) -> None:
        self._context = None
        raise AioUnavailable("not here")

    monkeypatch.setattr(Queue, "__init__", refuse)
    reads = transfers(handle, 10)
    ended = run(reads, 4)
    assert ended == run(reads, 1)
    assert len(ended) == 10


def test_a_batch_tells_of_every_frame_as_it_arrives(tmp_path: Path) -> None:
    config = SsdConfig(budget_bytes=8 << 20, segment_bytes=1 << 20, free_floor_bytes=0)
    tier, _ = SsdTier.open(tmp_path / "s", config)
    stored = store(tier, [make_frame(key_of(i), (20_000, 300)) for i in range(60)])
    Random(3).shuffle(stored)
    items = [ReadItem(s.location, aligned_buffer(s.length)[: s.length]) for s in stored[:40]]
    items.insert(11, ReadItem(Location(99, PAGE_BYTES), aligned_buffer(PAGE_BYTES)))
    arrived: list[int] = []

    def whole(i: int) -> None:
        arrived.append(i)
        assert verify_frame(items[i].into) is None, "told before its bytes were there"

    errors = tier.read_batch(items, whole)
    assert [i for i, e in enumerate(errors) if e is not None] == [11]
    assert sorted([*arrived, 11]) == list(range(41))
    tier.close()
