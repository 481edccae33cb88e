"""Files of another version: a clear error, or set aside and made anew; nothing is deleted."""

from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest
import xxhash

from kvstore.config import SsdConfig
from kvstore.errors import StoreFormatError
from kvstore.testing.tiers_frames import key_of, make_frame, store
from kvstore.tiers.ssd import SsdTier

CONFIG = SsdConfig(budget_bytes=1 << 20, segment_bytes=64 << 10, free_floor_bytes=0)
VERSIONS = (0, 2, 255)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tier, _ = SsdTier.open(tmp_path / "s", CONFIG)
    store(tier, [make_frame(key_of(i)) for i in range(5)])
    tier.close()
    return tmp_path / "s"


def contents(directory: Path) -> dict[str, bytes]:
    """Every file that means something; the lock's holder does not."""
    files = [p for p in directory.rglob("*") if p.is_file() and p.name != "LOCK"]
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def format_file(directory: Path, version: int) -> None:
    path = directory / "FORMAT"
    text = path.read_text().splitlines()[0].replace('"version": 1', f'"version": {version}')
    path.write_text(f"{text}\n{xxhash.xxh3_128_hexdigest(text.encode())}\n")


def segment(directory: Path, version: int) -> None:
    path = directory / "segments" / "00000001.seg"
    data = bytearray(path.read_bytes())
    data[8] = version
    data[4080:4096] = xxhash.xxh3_128_digest(data[:4080])
    path.write_bytes(data)


def index(directory: Path, version: int) -> None:
    with lmdb.open(str(directory / "index.lmdb"), max_dbs=3, lock=False) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True, db=meta) as txn:
            body = version.to_bytes(4, "little") + txn.get(b"format")[4:20]
            txn.put(b"format", body + xxhash.xxh3_64_digest(b"format" + body))


def secret(directory: Path, version: int) -> None:
    path = directory / "tenant.secret"
    words = path.read_text().rsplit(" ", 1)[0].replace("secret 1", f"secret {version}")
    path.write_text(f"{words} {xxhash.xxh3_128_hexdigest(words.encode())}\n")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("change", [format_file, segment, index, secret])
def test_another_version_is_refused_and_nothing_is_touched(
    directory: Path, change: Callable[[Path, int], None], version: int
) -> None:
    change(directory, version)
    before = contents(directory)
    with pytest.raises(StoreFormatError) as raised:
        SsdTier.open(directory, CONFIG)
    says = str(raised.value)
    if change is not secret:
        assert f"version {version}" in says
    assert any(advice in says for advice in ("release that wrote", "restore it from a backup"))
    assert contents(directory) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_index_records_of_another_version_are_set_aside_and_made_anew(
    directory: Path, version: int
) -> None:
    with lmdb.open(str(directory / "index.lmdb"), max_dbs=3, lock=False) as env:
        blocks = env.open_db(b"blocks")
        with env.begin(write=True, db=blocks) as txn:
            body = bytes([version]) + txn.get(key_of(3))[1:88]
            txn.put(key_of(3), body + xxhash.xxh3_64_digest(key_of(3) + body))
    odd = (directory / "index.lmdb" / "data.mdb").read_bytes()
    tier, recovered = SsdTier.open(directory, CONFIG)
    assert recovered.rebuilt
    assert sorted(recovered.keys) == sorted(key_of(i) for i in range(5))
    assert (directory / "aside" / "index.lmdb.1" / "data.mdb").read_bytes() == odd
    tier.close()


@pytest.mark.parametrize("frames", [range(1), range(4, 5), range(5)])
def test_a_segment_with_frames_of_another_version_is_not_deleted(
    directory: Path, frames: range
) -> None:
    path = directory / "segments" / "00000001.seg"
    data, at = bytearray(path.read_bytes()), 4096
    for i in range(5):
        size = int.from_bytes(data[at + 14 : at + 16], "little")
        length = int.from_bytes(data[at + 16 : at + 20], "little")
        if i in frames:
            data[at + 8] = 9
            data[at + size - 16 : at + size] = xxhash.xxh3_128_digest(data[at : at + size - 16])
        at += length
    path.write_bytes(data)
    (directory / "index.lmdb" / "data.mdb").unlink()
    tier, recovered = SsdTier.open(directory, CONFIG)
    assert len(recovered.keys) == 5 - len(frames)
    assert any("frame version 9" in note for note in recovered.notes)
    store(tier, [make_frame(key_of("new"))])
    tier.close()
    assert path.read_bytes() == data
