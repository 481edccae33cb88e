"""What lies on disk, against docs/format.md: written here from that page, not by the code."""

import json
import struct
from pathlib import Path

import lmdb
import xxhash

from kvstore.config import SsdConfig
from kvstore.testing.tiers_frames import DESCRIPTOR, NAMESPACE_ID, key_of, make_frame, store
from kvstore.tiers.frame import decode_header
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.lmdb_pages import read_records

CONFIG = SsdConfig(budget_bytes=1 << 20, segment_bytes=64 << 10, free_floor_bytes=0)


def x128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def sealed(key: bytes, body: bytes) -> bytes:
    return body + xxhash.xxh3_64_digest(key + body)


def test_every_file_is_as_the_page_says(tmp_path: Path) -> None:
    tier, _ = SsdTier.open(tmp_path, CONFIG)
    frames = [make_frame(key_of(i), (5000, i + 1), depth=i) for i in range(3)]
    stored = store(tier, frames)
    secret = tier.tenant_secret
    tier.close()

    line, digest, rest = (tmp_path / "FORMAT").read_text().split("\n")
    assert (digest, rest) == (x128(line.encode()).hex(), "")
    said = json.loads(line)
    assert line == json.dumps(said, sort_keys=True)
    assert (said["format"], said["version"]) == ("ds41-kvstore-ssd", 1)
    store_id = bytes.fromhex(said["store_id"])
    assert len(store_id) == 16

    words = f"ds41-kvstore tenant secret 1 {secret.hex()}"
    expected = f"{words} {x128(words.encode()).hex()}\n"
    assert (tmp_path / "tenant.secret").read_text() == expected

    (segment,) = (tmp_path / "segments").iterdir()
    assert segment.name == "00000001.seg"
    data = segment.read_bytes()
    created = data[32:40]
    header = b"DS41SEG\0" + struct.pack("<HHI", 1, 0, 1) + store_id + created + bytes(4040)
    assert data == header + x128(header) + b"".join(frames)

    env = lmdb.open(str(tmp_path / "index.lmdb"), max_dbs=3, lock=False, readonly=True)
    contents = {}
    for name in (b"blocks", b"namespaces", b"meta"):
        db = env.open_db(name, create=False)
        with env.begin(db=db) as txn:
            contents[name] = dict(txn.cursor())
    assert contents[b"blocks"] == {s.key: entry(s.frame, s.location) for s in stored}
    number = struct.pack(">I", 1)
    assert contents[b"namespaces"] == {number: sealed(number, NAMESPACE_ID + DESCRIPTOR)}
    assert contents[b"meta"] == {
        b"format": sealed(b"format", struct.pack("<I", 1) + store_id),
        b"log_end": sealed(b"log_end", struct.pack("<IQ", 1, len(data))),
    }
    env.close()

    index = (tmp_path / "index.lmdb" / "data.mdb").read_bytes()
    clean = f"ds41-kvstore clean stop 1 {len(index)} {x128(index).hex()}\n"
    assert (tmp_path / "index.lmdb" / "clean").read_text() == clean


def entry(frame: memoryview, location: tuple[int, int]) -> bytes:
    header = decode_header(frame)
    body = struct.pack("<BBBB", 1, 1, 0, 0)
    body += struct.pack("<III", 1, header.depth, location[0])
    body += struct.pack("<QII", location[1], len(frame), header.payload_length)
    body += struct.pack("<d", header.created_wall_s) + header.parent + bytes(frame[496:512])
    assert len(body) == 88
    return sealed(header.key, body)


def test_the_page_reader_reads_what_lmdb_reads(tmp_path: Path) -> None:
    """Trees of every depth up to three, after random inserts and deletes."""
    env = lmdb.open(str(tmp_path), map_size=1 << 28, max_dbs=2, lock=False, sync=False)
    other, db = env.open_db(b"another"), env.open_db(b"blocks")
    for round_, count in enumerate([0, 1, 10, 300, 9000]):
        with env.begin(write=True, db=db) as txn:
            for i in range(count):
                txn.put(key_of((round_, i)), (key_of(i) * 3)[:96])
            for i in range(0, count, 3):
                txn.delete(key_of((round_, i)))
            txn.put(b"x", b"of another size", db=other)
        rows = read_records(tmp_path / "data.mdb", b"blocks", 32, 96)
        with env.begin(db=db) as txn:
            there = list(txn.cursor())
        assert rows.tobytes() == b"".join(key + value for key, value in there)
    with env.begin(db=db) as txn:
        assert txn.stat(db)["depth"] == 3
    env.close()
