"""Window snapshots and hand-over records over every door and every way for bytes."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemons import SMALL, STORE_SETTINGS, Door, chain, keys_of
from doors import doors_of, opened, serving

from kvstore import ImageSpan, Namespace, NamespaceHandle, PutOutcome, connect, snapshot_key
from kvstore.errors import InvalidRequest, MessageTooLarge, UnknownNamespace

SETTINGS = {
    **STORE_SETTINGS,
    "windows.budget_bytes": "512KiB",
    "windows.payload_bytes_max": "300KiB",
}
DAEMON_SETTINGS = {
    **SETTINGS,
    "server.message_bytes_max": "64KiB",
    "server.data_port.frame_bytes_max": "64KiB",
}
KINDS = ("file", "unix", "unix?data=port", "unix?data=grpc", "dns")
SIZES = (0, 1, 4096, 40_000, 65_536, 65_537, 200_000)
"""Of payloads: below, at and above a page, a message and a frame."""
STORED = PutOutcome.STORED
BLOCK = SMALL.block_tokens


@pytest.fixture(scope="module")
def daemon_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("windows"), DAEMON_SETTINGS, on_disk=False) as urls:
        yield urls


@pytest.fixture(params=doors_of(KINDS), ids="-".join)
def door(
    request: pytest.FixtureRequest, daemon_urls: dict[str, str], tmp_path: Path
) -> Iterator[Door]:
    with opened(request.param, daemon_urls, tmp_path, SETTINGS) as door:
        yield door


def tokens_of(count: int, seed: int = 0) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 17, count, dtype=np.uint32)


def payload_of(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng([seed, size]).bytes(size)


def test_payloads_of_every_size_come_back(door: Door) -> None:
    ns, tokens = door.open(), tokens_of(100)
    for at, size in enumerate(SIZES, 1):
        payload = payload_of(size)
        assert door.do(door.client.put_snapshot(ns, tokens[:at], payload)) is STORED
        assert door.do(door.client.get_window(ns, ns.snapshot_key(tokens[:at]))) == payload
        assert door.do(door.client.put_handover(ns, "request", payload[::-1])) is STORED
        assert door.do(door.client.wait_handover(ns, "request", 0.0)) == payload[::-1]


def test_a_payload_is_any_buffer(door: Door) -> None:
    ns, tokens, payload = door.open(), tokens_of(40), payload_of(8000)
    key = ns.snapshot_key(tokens)
    for buffer in (
        bytearray(payload),
        memoryview(payload),
        np.frombuffer(payload, np.uint8).reshape(-1, 8),
        np.frombuffer(payload, np.float32),
    ):
        door.do(door.client.put_snapshot(ns, tokens, bytes(8000)))
        assert door.do(door.client.put_snapshot(ns, tokens, buffer)) is STORED
        assert door.do(door.client.get_window(ns, key)) == payload


def test_one_lookup_tells_of_blocks_and_snapshots(door: Door) -> None:
    ns, tokens = door.open(), tokens_of(5 * BLOCK + 3)
    put = chain(ns, 3)
    tokens[: 3 * BLOCK] = np.random.default_rng(0).integers(0, 1 << 17, 3 * BLOCK, dtype=np.uint32)
    assert keys_of(put) == ns.block_keys(tokens)[:3]
    assert door.do(door.client.put(ns, put)) == [STORED] * 3
    # before the first block's end, in the middle, at the end of the hits, behind them, at the end
    positions = (5, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 7, 5 * BLOCK + 3)
    for at in positions:
        door.do(door.client.put_snapshot(ns, tokens[:at], payload_of(at)))
    match = door.do(door.client.match(ns, ns.block_keys(tokens)))
    assert match.hit_blocks == 3
    assert [r.blocks * BLOCK + r.tail_tokens for r in match.snapshots] == [*positions][::-1]
    assert [r.payload_bytes for r in match.snapshots] == [*positions][::-1]
    assert [r.key for r in match.snapshots] == [
        ns.snapshot_key(tokens[:at]) for at in reversed(positions)
    ]
    lease = door.do(door.client.acquire(ns, ns.block_keys(tokens)))
    assert lease.match.snapshots == match.snapshots
    door.do(lease.release())
    waited = door.do(door.client.wait_for(ns, ns.block_keys(tokens), 0.0))
    assert waited.snapshots == match.snapshots
    # full blocks that are no hits are no use, and neither is a snapshot of all the tokens
    longest = ns.longest_snapshot(match, tokens)
    assert longest is not None
    assert (longest.blocks, longest.tail_tokens) == (3, 0)
    longest = ns.longest_snapshot(match, tokens[: 3 * BLOCK])
    assert longest is not None
    assert (longest.blocks, longest.tail_tokens) == (2, 1)
    assert ns.longest_snapshot(match, tokens[:5]) is None
    short = door.do(door.client.match(ns, ns.block_keys(tokens[:9])))
    assert ns.longest_snapshot(short, tokens[:9]) == short.snapshots[0] == match.snapshots[-1]


def test_snapshots_of_other_tokens_are_told_and_not_taken(door: Door) -> None:
    ns, ours = door.open(), tokens_of(2 * BLOCK + 9)
    door.do(door.client.put(ns, chain(ns, 2)))
    ours[: 2 * BLOCK] = np.random.default_rng(0).integers(0, 1 << 17, 2 * BLOCK, dtype=np.uint32)
    theirs = ours.copy()
    theirs[2 * BLOCK + 4 :] += 1
    for at in (2 * BLOCK + 3, 2 * BLOCK + 8):
        door.do(door.client.put_snapshot(ns, theirs[:at], b"theirs"))
    match = door.do(door.client.match(ns, ns.block_keys(ours)))
    assert [ref.tail_tokens for ref in match.snapshots] == [8, 3]
    longest = ns.longest_snapshot(match, ours)
    assert longest is not None
    assert longest.tail_tokens == 3
    other = theirs.copy()
    other[0] += 1
    assert door.do(door.client.match(ns, ns.block_keys(other))).snapshots == ()


def test_images_tell_snapshots_apart(door: Door) -> None:
    ns, tokens = door.open(), tokens_of(3 * BLOCK)
    tokens[20:44] = 7
    pictures = [[ImageSpan(20, 24, bytes([n]) * 32)] for n in range(2)]
    for n, images in enumerate(pictures):
        door.do(door.client.put_snapshot(ns, tokens[:45], bytes([n]) * 9, images=images))
    for n, images in enumerate(pictures):
        match = door.do(door.client.match(ns, ns.block_keys(tokens, images)))
        assert len(match.snapshots) == 1
        (ref,) = match.snapshots
        key = ns.block_keys(tokens, images)[1]
        assert ref.key == snapshot_key(key, tokens[2 * BLOCK : 45], 2 * BLOCK, images)
        assert door.do(door.client.get_window(ns, ref.key)) == bytes([n]) * 9


def test_a_put_replaces(door: Door) -> None:
    ns, tokens = door.open(), tokens_of(20)
    for n in range(3):
        door.do(door.client.put_snapshot(ns, tokens, payload_of(5000 - n, n)))
        door.do(door.client.put_handover(ns, "r", payload_of(5000 + n, n)))
    assert door.do(door.client.get_window(ns, ns.snapshot_key(tokens))) == payload_of(4998, 2)
    assert door.do(door.client.wait_handover(ns, "r", 0.0)) == payload_of(5002, 2)
    match = door.do(door.client.match(ns, ns.block_keys(tokens)))
    assert [ref.payload_bytes for ref in match.snapshots] == [4998]


def test_reading_consumes_nothing_and_dropping_all(door: Door) -> None:
    ns = door.open()
    door.do(door.client.put_handover(ns, "r", b"record"))
    for _ in range(3):
        assert door.do(door.client.wait_handover(ns, "r", 1.0)) == b"record"
    assert door.do(door.client.drop_handover(ns, "r")) is True
    assert door.do(door.client.drop_handover(ns, "r")) is False
    assert door.do(door.client.wait_handover(ns, "r", 0.0)) is None


def test_a_wait_ends_when_the_record_comes(door: Door) -> None:
    ns, payload = door.open(), payload_of(100_000)
    if door.url.startswith("file"):
        # the store is this process's alone: the same client puts from another thread
        if hasattr(door.client, "_client"):
            threading.Timer(0.2, door.client.put_handover, (ns, "r", payload)).start()
        else:
            door.do(door.client.put_handover(ns, "r", payload))
    else:
        threading.Timer(0.2, _put, (door.url, ns, payload)).start()
    started_s = time.monotonic()
    assert door.do(door.client.wait_handover(ns, "r", 60.0)) == payload
    assert time.monotonic() - started_s < 30.0


def _put(url: str, ns: NamespaceHandle, payload: bytes) -> None:
    with connect(url) as client:
        client.open_namespace(ns.namespace)
        client.put_handover(ns, "r", payload)


def test_a_wait_ends_with_its_deadline(door: Door) -> None:
    ns = door.open()
    started_s = time.monotonic()
    assert door.do(door.client.wait_handover(ns, "never", 0.1)) is None
    assert 0.1 <= time.monotonic() - started_s < 20.0


def test_what_has_lapsed_is_a_miss(door: Door) -> None:
    ns, tokens = door.open(), tokens_of(20)
    door.do(door.client.put_snapshot(ns, tokens, b"short", ttl_s=0.05))
    door.do(door.client.put_handover(ns, "r", b"short", ttl_s=0.05))
    time.sleep(0.1)
    assert door.do(door.client.get_window(ns, ns.snapshot_key(tokens))) is None
    assert door.do(door.client.wait_handover(ns, "r", 0.0)) is None
    assert door.do(door.client.match(ns, ns.block_keys(tokens))).snapshots == ()


def test_the_pool_keeps_its_budget_and_the_latest(door: Door) -> None:
    ns = door.open()
    for n in range(40):
        payload = payload_of(100_000, n)
        assert door.do(door.client.put_handover(ns, f"r{n}", payload)) is STORED
        windows = door.do(door.client.stat()).windows
        assert windows.payload_bytes <= windows.used_bytes <= windows.budget_bytes == 512 << 10
    assert door.do(door.client.wait_handover(ns, "r39", 0.0)) == payload
    assert door.do(door.client.wait_handover(ns, "r0", 0.0)) is None


def test_no_namespace_sees_another(door: Door) -> None:
    tokens = tokens_of(20)
    one, two = (
        door.do(door.client.open_namespace(Namespace("m", "r", SMALL, tenant=tenant)))
        for tenant in ("one", "two")
    )
    door.do(door.client.put_snapshot(one, tokens, b"one's"))
    door.do(door.client.put_handover(one, "r", b"one's"))
    assert door.do(door.client.get_window(two, one.snapshot_key(tokens))) is None
    assert door.do(door.client.wait_handover(two, "r", 0.0)) is None
    assert door.do(door.client.drop_handover(two, "r")) is False
    for keys in (one.block_keys(tokens), two.block_keys(tokens), []):
        assert door.do(door.client.match(two, keys)).snapshots == ()
    assert door.do(door.client.get_window(one, one.snapshot_key(tokens))) == b"one's"


def test_what_a_pool_can_never_take_is_an_error(door: Door) -> None:
    ns, tokens = door.open(), tokens_of(20)
    for size in (300 * 1024 + 1, 1 << 20):
        for call in (
            lambda size=size: door.client.put_snapshot(ns, tokens, bytes(size)),
            lambda size=size: door.client.put_handover(ns, "r", bytes(size)),
        ):
            error = door.fails(call)
            assert type(error) is MessageTooLarge, error
            assert f"{size} B" in str(error)
            assert "windows.payload_bytes_max" in str(error)
    assert door.do(door.client.get_window(ns, ns.snapshot_key(tokens))) is None


def test_wrong_arguments_are_named(door: Door) -> None:
    ns, tokens, client = door.open(), tokens_of(20), door.client
    for call, says in (
        (lambda: client.put_snapshot(ns, [], b"x"), "no tokens"),
        (lambda: client.put_snapshot(ns, tokens, b"x", ttl_s=0), "above 0, not 0"),
        (lambda: client.put_snapshot(ns, tokens, b"x", ttl_s=float("nan")), "above 0, not nan"),
        (lambda: client.put_snapshot(ns, tokens, np.zeros(8, np.uint8)[::2]), "contiguous"),
        (lambda: client.put_handover(ns, "", b"x"), "1 to 256 bytes"),
        (lambda: client.put_handover(ns, "é" * 129, b"x"), "1 to 256 bytes of UTF-8, not 258"),
        (lambda: client.put_handover(ns, "\ud800", b"x"), "Unicode"),
        (lambda: client.put_handover(ns, b"r", b"x"), "is text, not bytes"),
        (lambda: client.wait_handover(ns, "", 1.0), "1 to 256 bytes"),
        (lambda: client.wait_handover(ns, "r", -1.0), "≥ 0, not -1"),
        (lambda: client.drop_handover(ns, None), "is text, not NoneType"),
        (lambda: client.get_window(ns, b"short"), "32 bytes, not 5"),
        (lambda: client.get_window(ns, "r"), "32 bytes, not str"),
    ):
        error = door.fails(call)
        assert type(error) is InvalidRequest, error
        assert says in str(error)
    assert door.do(client.match(ns, [])).snapshots == ()


def test_a_namespace_that_was_not_opened_is_an_error(door: Door) -> None:
    ns = door.open()
    stranger = NamespaceHandle(b"\1" * 32, ns.namespace)
    for call in (
        lambda: door.client.put_snapshot(stranger, tokens_of(9), b"x"),
        lambda: door.client.put_handover(stranger, "r", payload_of(100_000)),
        lambda: door.client.get_window(stranger, b"\1" * 32),
        lambda: door.client.wait_handover(stranger, "r", 5.0),
        lambda: door.client.drop_handover(stranger, "r"),
    ):
        assert type(door.fails(call)) is UnknownNamespace
