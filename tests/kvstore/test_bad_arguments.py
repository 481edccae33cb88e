"""Arguments that can't be right, or only nearly, before every door: one error with the value, and
nothing was changed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import STORE_SETTINGS, Door, chain, keys_of
from doors import doors_of, opened, serving

import kvstore
from kvstore import Durability, Outlook, PutOutcome, Tier
from kvstore.config import DaemonConfig, build_config
from kvstore.errors import ConfigError, InvalidRequest, UnsupportedURL

KINDS = ("file", "unix?data=shared", "unix?data=port", "unix?data=grpc", "dns")
NO_TIMES: list[Any] = [-1, -math.inf, math.nan, "30", True, [1]]
NO_DURABILITIES: list[Any] = [1, True, "durable", None, Outlook.TOOL_CALL]
NO_TIERS: list[Any] = [99, 2, Tier.NONE, Tier.DRAM | Tier.SSD, "ssd", Durability.DURABLE]
NO_OUTLOOKS: list[Any] = [77, 1, "tool_call", None, Durability.DURABLE]
LONG: list[Any] = [math.inf, 1e300, np.float64(1e12)]


@pytest.fixture(scope="module")
def daemon_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("doors"), STORE_SETTINGS, on_disk=True) as urls:
        yield urls


@pytest.fixture(params=doors_of(KINDS), ids="-".join)
def door(
    request: pytest.FixtureRequest, daemon_urls: dict[str, str], tmp_path: Path
) -> Iterator[Door]:
    with opened(request.param, daemon_urls, tmp_path, STORE_SETTINGS) as door:
        yield door


def refused(door: Door, call: Any, value: object) -> None:
    error = door.fails(call)
    assert type(error) is InvalidRequest, (value, error)
    assert repr(value) in str(error)


def test_what_is_no_durability_stores_nothing(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 2)
    for value in NO_DURABILITIES:
        refused(door, lambda v=value: door.client.put(ns, blocks, v), value)
    assert door.do(door.client.match(ns, keys_of(blocks))).hit_blocks == 0
    grant = door.do(door.client.reserve(ns, [(b.key, b.parent) for b in blocks]))
    for block in blocks:
        door.do(door.client.write(grant.reservation_id, block.key, block.sections))
    for value in NO_DURABILITIES:
        refused(door, lambda v=value: door.client.commit(grant.reservation_id, v), value)
    done = door.do(door.client.commit(grant.reservation_id, Durability.DURABLE))
    assert done == [PutOutcome.STORED] * 2


def test_what_is_no_tier_or_outlook_drops_nothing(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 2)
    door.do(door.client.put(ns, blocks))
    keys = keys_of(blocks)
    for value in NO_TIERS:
        refused(door, lambda v=value: door.client.evict(ns, keys, v), value)
        refused(door, lambda v=value: door.client.evict(tier=v), value)
    for value in NO_OUTLOOKS:
        refused(door, lambda v=value: door.client.answered(ns, keys, v), value)
    assert door.do(door.client.match(ns, keys)).hit_blocks == 2


def test_what_is_no_time_is_refused(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 1)
    keys, pairs = keys_of(blocks), [(b.key, b.parent) for b in blocks]
    client = door.client
    lease = door.do(client.acquire(ns, keys))
    for value in NO_TIMES:
        for call in (
            lambda v: client.wait_for(ns, keys, v),
            lambda v: client.wait_handover(ns, "r", v),
            lambda v: client.verify(deadline_s=v),
            lambda v: client.acquire(ns, keys, v),
            lambda v: client.reserve(ns, pairs, v),
            lambda v: lease.renew(v),
            lambda v: client.put_snapshot(ns, [1, 2, 3], b"x", ttl_s=v),
            lambda v: client.put_handover(ns, "r", b"x", ttl_s=v),
        ):
            refused(door, lambda call=call, value=value: call(value), value)


def test_the_longest_times_are_taken(door: Door) -> None:
    ns = door.open()
    (block,) = chain(ns, 1)
    client = door.client
    door.do(client.put(ns, [block]))
    for value in LONG:
        assert door.do(client.wait_for(ns, [block.key], value)).hit_blocks == 1
        assert door.do(client.verify(deadline_s=value)).clean
        lease = door.do(client.acquire(ns, [block.key], value))
        assert 0 < door.do(lease.renew(value)) < math.inf
        door.do(lease.release())
        put = door.do(client.put_handover(ns, "r", b"x", ttl_s=value))
        assert put is PutOutcome.STORED
        assert door.do(client.wait_handover(ns, "r", value)) == b"x"


def test_a_client_is_opened_with_a_time_or_not_at_all(
    daemon_urls: dict[str, str], tmp_path: Path
) -> None:
    urls = (
        f"file://{tmp_path}/store",
        *(f"{daemon_urls['unix']}?data={d}" for d in ("grpc", "shared")),
    )
    for url in urls:
        for value in (*NO_TIMES, 0):
            with pytest.raises(InvalidRequest) as caught:
                kvstore.connect(url, deadline_s=value)
            assert repr(value) in str(caught.value)
        for value in LONG:
            with kvstore.connect(url, deadline_s=value) as client:
                assert client.stat().blocks >= 0
                client.flush()


@pytest.mark.parametrize("url", [5, None, b"file:///tmp/x", "file:///tmp/a\0b", "dns:///a\0b:1"])
def test_what_is_no_url_is_refused(url: Any) -> None:
    with pytest.raises(UnsupportedURL) as caught:
        kvstore.connect(url)
    assert repr(url) in str(caught.value)


def test_the_listening_form_of_an_address_is_told_as_a_client_writes_it() -> None:
    with pytest.raises(UnsupportedURL, match=r"dns:///127\.0\.0\.1:7000"):
        kvstore.connect("tcp://127.0.0.1:7000")


def test_sections_are_whole_numbers_of_any_kind(door: Door) -> None:
    ns = door.open()
    (block,) = chain(ns, 1)
    door.do(door.client.put(ns, [block]))
    lease = door.do(door.client.acquire(ns, [block.key]))
    (data,) = door.do(door.client.read(lease, [block.key], np.arange(2)))
    assert [bytes(s) for s in data.sections] == list(block.sections[:2])
    for value in (True, "0", 0.0, -1, 3):
        refused(door, lambda v=value: door.client.read(lease, [block.key], [v]), value)


def test_blocks_come_from_any_iterable(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 5)
    keys = keys_of(blocks)
    put = door.client.put
    assert door.do(put(ns, (b for b in blocks[:3]))) == [PutOutcome.STORED] * 3
    assert door.do(put(ns, iter(blocks[3:]), Durability.DURABLE)) == [PutOutcome.STORED] * 2
    lease = door.do(door.client.acquire(ns, keys))
    read = door.do(door.client.read(lease, keys))
    assert [[bytes(s) for s in r.sections] for r in read] == [b.sections for b in blocks]
    (other,) = chain(ns, 1, seed=1)
    refused(door, lambda: put(ns, 5), 5)
    refused(door, lambda: put(ns, other), other)
    for value in (None, other.key, (other.key, other.parent)):
        refused(door, lambda v=value: put(ns, (b for b in (other, v))), value)
    assert type(door.fails(lambda: put(ns, (b for b in ())))) is InvalidRequest
    assert door.do(door.client.match(ns, [other.key])).hit_blocks == 0


def test_a_listing_goes_on_behind_a_key_alone(door: Door) -> None:
    for after in (b"x", b"", "x" * 32, 5):
        error = door.fails(lambda a=after: door.client.ls(after=a))
        assert type(error) is InvalidRequest
        assert "after" in str(error)
    for limit in ("3", 1.5, True, 0, -1, None):
        refused(door, lambda v=limit: door.client.ls(limit=v), limit)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("lease.lease_ttl_s_default", "lease.lease_ttl_s_max"),
        ("lease.reservation_ttl_s_default", "lease.reservation_ttl_s_max"),
        ("windows.ttl_s_default", "windows.ttl_s_max"),
        ("migration.retry_s_min", "migration.retry_s_max"),
    ],
)
def test_a_least_is_not_above_its_most(low: str, high: str) -> None:
    build_config(DaemonConfig, {}, {low: 5.0, high: 5.0})
    with pytest.raises(ConfigError) as caught:
        build_config(DaemonConfig, {}, {low: 7.0, high: 5.0})
    for part in (low.partition(".")[2], high.partition(".")[2], " 7 ", " 5;"):
        assert part in str(caught.value)


def test_a_message_is_no_larger_than_grpc_takes() -> None:
    most = build_config(DaemonConfig, {}, {"server.message_bytes_max": 2**31 - 1})
    assert most.server.message_bytes_max == 2**31 - 1
    with pytest.raises(ConfigError, match=r"server\.message_bytes_max.*2147483647"):
        build_config(DaemonConfig, {}, {"server.message_bytes_max": "2GiB"})


def test_a_budget_below_three_segments_says_what_would_do() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(DaemonConfig, {}, {"ssd.budget_bytes": "100MiB"})
    assert f"raise it to {192 << 20}" in str(caught.value)
    assert "Value error" not in str(caught.value)
    assert "{" not in str(caught.value)
