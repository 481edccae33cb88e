"""The log on a real disk and on the simulated one: contract, lock, formats, restarts."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import xxhash

from kvstore.config import SsdConfig
from kvstore.errors import DiskError, StoreFormatError, StoreLocked
from kvstore.testing.disk import SimDisk, fail_next
from kvstore.testing.tiers import LogTierContract
from kvstore.testing.tiers_frames import (
    DESCRIPTOR,
    NAMESPACE_ID,
    Stored,
    key_of,
    load,
    make_frame,
    make_room,
    rows,
    store,
)
from kvstore.tiers.base import PAGE_BYTES, Recovered, WriteItem
from kvstore.tiers.frame import decode_header, layout_sections, seal_frame
from kvstore.tiers.ssd import SsdTier

CONFIG = SsdConfig(budget_bytes=1 << 20, segment_bytes=64 << 10, free_floor_bytes=0)


class TestOnARealDisk(LogTierContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "store"

    def open(self) -> tuple[SsdTier, Recovered]:
        return SsdTier.open(self.directory, CONFIG)

    def test_used_bytes_is_what_du_says(self, tier: SsdTier) -> None:
        store(tier, [make_frame(key_of(i), (9000,)) for i in range(30)])
        tier.refresh()
        du = subprocess.run(
            ["du", "-s", "-B1", str(self.directory)], capture_output=True, text=True, check=True
        )
        assert tier.used_bytes == int(du.stdout.split()[0])


class TestOnARealDiskThroughThePageCache(TestOnARealDisk):
    def open(self) -> tuple[SsdTier, Recovered]:
        return SsdTier.open(self.directory, CONFIG.model_copy(update={"direct_io": "off"}))


class TestOnASimulatedDisk(LogTierContract):
    @pytest.fixture(autouse=True)
    def _disk(self) -> None:
        self.disk = SimDisk()

    def open(self) -> tuple[SsdTier, Recovered]:
        return open_sim(self.disk)


def open_sim(disk: SimDisk, config: SsdConfig = CONFIG) -> tuple[SsdTier, Recovered]:
    return SsdTier.open(Path("/store"), config, files=disk, open_index=disk.open_index)


@pytest.mark.parametrize("seed", range(2))
def test_a_long_life_under_the_budget_never_passes_it(tmp_path: Path, seed: int) -> None:
    """Fill, evict the oldest, compact, for many times the budget; checked on the real disk."""
    random = Random(seed)
    tier, _ = SsdTier.open(tmp_path / "s", CONFIG)
    number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    live: dict[bytes, Stored] = {}
    written = 0
    for step in range(400):
        frame = make_frame(key_of(step), [random.randint(1, 12_000)])
        while (location := tier.place(len(frame))) is None:
            assert live, "nothing is left to evict"
            make_room(tier, live, random.randint(1, 8))
            assert tier.used_bytes <= CONFIG.budget_bytes
        tier.write_batch([WriteItem(location, key_of(step), number, frame)])
        live[key_of(step)] = Stored(key_of(step), frame, location)
        written += len(frame)
        assert tier.used_bytes <= CONFIG.budget_bytes
    assert written > 2 * CONFIG.budget_bytes
    assert tier.live_bytes > CONFIG.budget_bytes * 2 // 5
    tier.check_integrity()
    for s in live.values():
        assert load(tier, s.location, s.length) == s.frame
    tier.close()


# Whose directory it is


def test_a_second_store_is_told_who_has_the_directory(tmp_path: Path) -> None:
    tier, _ = SsdTier.open(tmp_path / "s", CONFIG)
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        SsdTier.open(tmp_path / "s", CONFIG)
    tier.close()
    SsdTier.open(tmp_path / "s", CONFIG)[0].close()


def test_the_lock_goes_with_the_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from kvstore.config import SsdConfig;"
        "from kvstore.tiers.ssd import SsdTier;"
        "SsdTier.open(Path(sys.argv[1]), SsdConfig(free_floor_bytes=0)); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=True)
    SsdTier.open(tmp_path / "s", CONFIG)[0].close()


def test_files_are_for_the_owner_only(tmp_path: Path) -> None:
    tier, _ = SsdTier.open(tmp_path / "s", CONFIG)
    store(tier, [make_frame(key_of(1))])
    tier.close()
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    for name in ("tenant.secret", "FORMAT", "segments/00000001.seg", "index.lmdb/data.mdb"):
        assert stat.S_IMODE((tmp_path / "s" / name).stat().st_mode) == 0o600


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreFormatError, match=r"not empty.*thesis\.tex"):
        SsdTier.open(tmp_path, CONFIG)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_directory_without_write_access_is_a_clear_error() -> None:
    disk = SimDisk()
    disk.before = fail_next("mkdir", errno.EACCES)
    with pytest.raises(DiskError, match=r"/store failed.*EACCES.*write access"):
        open_sim(disk)


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("")
    with pytest.raises(DiskError, match=r"opening the store in .*EEXIST|ENOTDIR"):
        SsdTier.open(tmp_path / "s", CONFIG)


# Formats


def test_a_newer_format_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    tier, _ = SsdTier.open(tmp_path / "s", CONFIG)
    tier.close()
    path = tmp_path / "s" / "FORMAT"
    text = path.read_text().splitlines()[0].replace('"version": 1', '"version": 2')
    path.write_text(f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}\n")
    with pytest.raises(StoreFormatError, match=r"version 2.*release that wrote"):
        SsdTier.open(tmp_path / "s", CONFIG)
    assert not (tmp_path / "s" / "aside").exists()


def test_a_newer_segment_is_refused(tmp_path: Path) -> None:
    tier, _ = SsdTier.open(tmp_path / "s", CONFIG)
    store(tier, [make_frame(key_of(1))])
    tier.close()
    path = tmp_path / "s" / "segments" / "00000001.seg"
    data = bytearray(path.read_bytes())
    data[8] = 2
    data[4080:4096] = xxhash.xxh3_128_digest(data[:4080])
    path.write_bytes(data)
    with pytest.raises(StoreFormatError, match="format version 2"):
        SsdTier.open(tmp_path / "s", CONFIG)


# Restarts


def test_the_log_goes_on_where_it_stopped(tmp_path: Path) -> None:
    tier, _ = SsdTier.open(tmp_path, CONFIG)
    (a,) = store(tier, [make_frame(key_of("a"))])
    tier.close()
    tier, _ = SsdTier.open(tmp_path, CONFIG)
    (b,) = store(tier, [make_frame(key_of("b"))])
    assert b.location == a.location._replace(offset=a.location.offset + a.length)
    tier.close()


def test_a_torn_tail_is_cut_and_whole_frames_before_it_adopted(tmp_path: Path) -> None:
    tier, _ = SsdTier.open(tmp_path, CONFIG)
    store(tier, [make_frame(key_of("a"))])
    tier.close()
    path = tmp_path / "segments" / "00000001.seg"
    whole, torn = make_frame(key_of("b"), (9000,)), make_frame(key_of("c"), (9000,))
    with path.open("ab") as f:
        f.write(whole)
        f.write(torn[:6000])
    tier, recovered = SsdTier.open(tmp_path, CONFIG)
    assert sorted(recovered.keys) == sorted([key_of("a"), key_of("b")])
    assert (recovered.adopted, recovered.cut_bytes) == (1, 6000)
    location, length = rows(recovered)[key_of("b")]
    assert load(tier, location, length) == whole
    assert path.stat().st_size == location.offset + length
    (d,) = store(tier, [make_frame(key_of("d"))])
    assert d.location.offset == path.stat().st_size - d.length
    tier.close()
    tier, recovered = SsdTier.open(tmp_path, CONFIG)
    assert (recovered.adopted, recovered.cut_bytes, len(recovered.keys)) == (0, 0, 3)
    tier.close()


def test_a_frame_inside_a_stored_section_is_never_adopted(tmp_path: Path) -> None:
    """A client may store bytes that look like another object's frame."""
    tier, _ = SsdTier.open(tmp_path, CONFIG)
    store(tier, [make_frame(key_of("a"))])
    tier.close()
    inner = make_frame(key_of("forged"))
    outer = make_frame(key_of("b"), (3 * PAGE_BYTES,))
    at = PAGE_BYTES - 512
    outer[512 + at : 512 + at + PAGE_BYTES] = inner
    digest = xxhash.xxh3_128_digest(outer[512 : 512 + 3 * PAGE_BYTES])
    header = decode_header(outer)
    seal_frame(outer, header._replace(sections=layout_sections((3 * PAGE_BYTES,), (digest,))))
    with (tmp_path / "segments" / "00000001.seg").open("ab") as f:
        f.write(outer)
    tier, recovered = SsdTier.open(tmp_path, CONFIG)
    assert sorted(recovered.keys) == sorted([key_of("a"), key_of("b")])
    tier.close()
    for path in (tmp_path / "index.lmdb").iterdir():
        path.unlink()
    tier, recovered = SsdTier.open(tmp_path, CONFIG)
    assert sorted(recovered.keys) == sorted([key_of("a"), key_of("b")])
    assert recovered.rebuilt
    tier.close()


def test_a_smaller_segment_size_starts_a_new_segment(tmp_path: Path) -> None:
    big = CONFIG.model_copy(update={"segment_bytes": 256 << 10})
    tier, _ = SsdTier.open(tmp_path, big)
    store(tier, [make_frame(key_of(i)) for i in range(30)])
    tier.close()
    tier, recovered = SsdTier.open(tmp_path, CONFIG)
    assert len(recovered.keys) == 30
    (new,) = store(tier, [make_frame(key_of("new"))])
    assert new.location == (2, PAGE_BYTES)
    tier.close()
