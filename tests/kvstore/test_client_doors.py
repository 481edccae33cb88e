"""One client over three doors and every way for bytes, blocking and asynchronous: the same answers
and the same errors."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from daemons import SMALL, STORE_SETTINGS, Door, chain, fresh_namespace, keys_of
from doors import doors_of, opened, serving

from kvstore import (
    BlockPut,
    Durability,
    Layout,
    NamespaceHandle,
    Outcome,
    Outlook,
    PutOutcome,
    SectionSpec,
    Tier,
    connect,
)
from kvstore.errors import (
    BlockOutOfOrder,
    InvalidRequest,
    LeaseExpired,
    MessageTooLarge,
    ReservationExpired,
    Unavailable,
    UnknownNamespace,
    WrongSectionSize,
)
from kvstore.namespace import namespace_id

DAEMON_SETTINGS = {
    **STORE_SETTINGS,
    "server.message_bytes_max": "64KiB",
    "server.data_port.frame_bytes_max": "64KiB",
}
KINDS = ("file", "unix", "unix?data=shared", "unix?data=port", "unix?data=grpc", "dns")
STORED, HIT = PutOutcome.STORED, Outcome.HIT


@pytest.fixture(scope="module")
def daemon_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("doors"), DAEMON_SETTINGS, on_disk=True) as urls:
        yield urls


@pytest.fixture(params=doors_of(KINDS), ids="-".join)
def door(
    request: pytest.FixtureRequest, daemon_urls: dict[str, str], tmp_path: Path
) -> Iterator[Door]:
    with opened(request.param, daemon_urls, tmp_path, STORE_SETTINGS) as door:
        yield door


def put_chain(door: Door, ns: NamespaceHandle, blocks: int, seed: int = 0) -> list[BlockPut]:
    put = chain(ns, blocks, seed)
    assert door.do(door.client.put(ns, put)) == [STORED] * blocks
    return put


def sections_of(data: object) -> list[bytes]:
    return [bytes(section) for section in data.sections]


def test_what_was_put_is_matched_and_read(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 5)
    keys = [*keys_of(blocks), b"\1" * 32]
    match = door.do(door.client.match(ns, keys))
    assert match.hit_blocks == 5
    assert match.outcomes[:6] == (HIT,) * 5 + (Outcome.MISS,)
    assert all(tier & (Tier.DRAM | Tier.SSD) for tier in match.residency[:5])
    assert match.block_bytes == SMALL.block_bytes
    lease = door.do(door.client.acquire(ns, keys))
    assert (lease.blocks, lease.keys, lease.match.hit_blocks) == (5, tuple(keys[:5]), 5)
    read = door.do(door.client.read(lease, lease.keys))
    assert [data.key for data in read] == keys[:5]
    assert [sections_of(data) for data in read] == [block.sections for block in blocks]
    door.do(lease.release())


def test_sections_are_read_alone_and_in_the_order_asked_for(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 3)
    lease = door.do(door.client.acquire(ns, keys_of(blocks)))
    read = door.do(door.client.read(lease, lease.keys, sections=(2, 0)))
    assert [sections_of(d) for d in read] == [[b.sections[2], b.sections[0]] for b in blocks]


def test_what_was_read_stays_valid_without_lease_block_and_client(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 8)
    lease = door.do(door.client.acquire(ns, keys_of(blocks)))
    read = door.do(door.client.read(lease, lease.keys))
    door.do(lease.release())
    door.do(door.client.flush())
    assert door.do(door.client.evict(ns)) == 8
    put_chain(door, ns, 64, seed=1)
    assert [sections_of(data) for data in read] == [block.sections for block in blocks]


def test_the_first_writer_wins(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 2)
    other = [replace(block, sections=[b"x" * n for n in SMALL.section_bytes]) for block in blocks]
    assert door.do(door.client.put(ns, other)) == [PutOutcome.PRESENT] * 2
    lease = door.do(door.client.acquire(ns, keys_of(blocks)))
    read = door.do(door.client.read(lease, lease.keys))
    assert [sections_of(data) for data in read] == [block.sections for block in blocks]


def test_arrays_are_sections_too(door: Door) -> None:
    ns = door.open()
    (block,) = chain(ns, 1)
    arrays = [np.frombuffer(s, np.uint8).reshape(-1, 4) for s in block.sections]
    assert door.do(door.client.put(ns, [replace(block, sections=arrays)])) == [STORED]
    lease = door.do(door.client.acquire(ns, [block.key]))
    (data,) = door.do(door.client.read(lease, lease.keys))
    assert sections_of(data) == block.sections


def test_more_than_a_message_goes_in_batches(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 1000)
    keys = keys_of(blocks)
    lease = door.do(door.client.acquire(ns, keys))
    read = door.do(door.client.read(lease, keys))
    assert [sections_of(data) for data in read] == [block.sections for block in blocks]


def test_reserved_blocks_are_pending_until_committed(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 2)
    grant = door.do(door.client.reserve(ns, [(b.key, b.parent) for b in blocks]))
    assert grant.outcomes == (STORED, STORED)
    pending = door.do(door.client.match(ns, keys_of(blocks)))
    assert (pending.hit_blocks, pending.outcomes[0]) == (0, Outcome.PENDING)
    assert door.do(door.client.put(ns, blocks[:1])) == [PutOutcome.PENDING]
    for block in blocks:
        door.do(door.client.write(grant.reservation_id, block.key, block.sections))
    assert door.do(door.client.commit(grant.reservation_id)) == [STORED, STORED]
    assert door.do(door.client.match(ns, keys_of(blocks))).hit_blocks == 2


def test_an_aborted_reservation_leaves_nothing(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 2)
    grant = door.do(door.client.reserve(ns, [(b.key, b.parent) for b in blocks]))
    door.do(door.client.abort(grant.reservation_id))
    assert door.do(door.client.match(ns, keys_of(blocks))).hit_blocks == 0
    error = door.fails(lambda: door.client.commit(grant.reservation_id))
    assert isinstance(error, ReservationExpired)
    assert door.do(door.client.put(ns, blocks)) == [STORED, STORED]


def test_waiting_ends_when_another_client_commits(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 1)
    grant = door.do(door.client.reserve(ns, [(b.key, b.parent) for b in blocks]))
    if door.url.startswith("file"):
        door.do(door.client.write(grant.reservation_id, blocks[0].key, blocks[0].sections))
        door.do(door.client.commit(grant.reservation_id))
    else:
        writer = threading.Timer(0.1, _commit, (door.url, grant.reservation_id, blocks))
        writer.start()
    assert door.do(door.client.wait_for(ns, keys_of(blocks), 20.0)).hit_blocks == 1


def _commit(url: str, reservation_id: int, blocks: list[BlockPut]) -> None:
    with connect(url) as client:
        for block in blocks:
            client.write(reservation_id, block.key, block.sections)
        client.commit(reservation_id)


def test_waiting_ends_with_its_deadline(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 1)
    grant = door.do(door.client.reserve(ns, [(b.key, b.parent) for b in blocks]))
    match = door.do(door.client.wait_for(ns, keys_of(blocks), 0.05))
    assert match.outcomes[0] is Outcome.PENDING
    door.do(door.client.abort(grant.reservation_id))


def test_a_released_lease_reads_nothing(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 1)
    lease = door.do(door.client.acquire(ns, keys_of(blocks), ttl_s=30.0))
    assert door.do(lease.renew(40.0)) == lease.ttl_s == 40.0
    door.do(lease.release())
    door.do(lease.release())
    for call in (lambda: door.client.read(lease, keys_of(blocks)), lambda: lease.renew()):
        assert isinstance(door.fails(call), LeaseExpired)


def test_the_end_of_an_answer_can_be_told(door: Door) -> None:
    ns, client = door.open(), door.client
    keys = keys_of(put_chain(door, ns, 4))
    before = door.do(client.stat()).counters["answers_told"]
    door.do(client.answered(ns, keys, Outlook.TOOL_CALL))
    door.do(client.answered(ns, keys, Outlook.USER_TURN, 2))
    door.do(client.end_session(ns, keys))
    # blocks that are not there are passed over
    door.do(client.end_session(ns, [bytes(32)]))
    assert door.do(client.stat()).counters["answers_told"] == before + 4
    assert door.do(client.match(ns, keys)).hit_blocks == 4
    error = door.fails(lambda: client.answered(ns, keys, Outlook.USER_TURN, 5))
    assert type(error) is InvalidRequest
    assert "lasting_blocks 5 of 4" in str(error)
    nowhere = NamespaceHandle(bytes(32), ns.namespace)
    assert type(door.fails(lambda: client.end_session(nowhere, keys))) is UnknownNamespace


def test_leased_blocks_outlive_evict(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 4)
    door.do(door.client.flush())
    lease = door.do(door.client.acquire(ns, keys_of(blocks[:2])))
    assert door.do(door.client.evict(ns)) == 2
    assert door.do(door.client.match(ns, keys_of(blocks))).hit_blocks == 2
    door.do(lease.release())
    assert door.do(door.client.evict(ns, keys_of(blocks[:2]))) == 2
    assert door.do(door.client.match(ns, keys_of(blocks))).hit_blocks == 0


def test_durable_blocks_are_on_ssd(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 3)
    assert door.do(door.client.put(ns, blocks, Durability.DURABLE)) == [STORED] * 3
    match = door.do(door.client.match(ns, keys_of(blocks)))
    assert all(Tier.SSD in tier for tier in match.residency)
    more = chain(ns, 3, seed=1)
    door.do(door.client.put(ns, more))
    door.do(door.client.flush())
    match = door.do(door.client.match(ns, keys_of(more)))
    assert all(Tier.SSD in tier for tier in match.residency)


def test_ls_pages_through_a_namespace(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 5)
    put_chain(door, door.open(), 2)
    first = door.do(door.client.ls(ns, limit=3))
    rest = door.do(door.client.ls(ns, limit=3, after=first[-1].key))
    assert (len(first), len(rest)) == (3, 2)
    infos = {info.key: info for info in (*first, *rest)}
    assert set(infos) == set(keys_of(blocks))
    for depth, block in enumerate(blocks):
        info = infos[block.key]
        assert (info.depth, info.parent, info.namespace_id) == (depth, block.parent, ns.id)
        assert info.payload_bytes == SMALL.block_bytes


def test_stat_accounts_for_every_key_looked_up(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 3)
    before = door.do(door.client.stat())
    door.do(door.client.match(ns, [*keys_of(blocks), b"\1" * 32, b"\2" * 32]))
    after = door.do(door.client.stat())
    grown = {k: n - before.lookup_blocks[k] for k, n in after.lookup_blocks.items()}
    assert sum(grown.values()) == 5
    assert grown["miss"] == 2
    assert after.puts["stored"] >= 3


def test_verify_checks_every_frame(door: Door) -> None:
    ns = door.open()
    put_chain(door, ns, 3)
    door.do(door.client.flush())
    seen: list[tuple[int, int]] = []
    report = door.do(door.client.verify(lambda done, total: seen.append((done, total))))
    assert report.clean
    assert report.frames[Tier.SSD] >= 3
    assert all(0 <= done <= total for done, total in seen)
    assert seen == sorted(seen)
    # a daemon tells now and then, a store in the process of every piece
    assert seen or not door.url.startswith("file")


def test_wrong_bytes_are_refused_on_arrival(door: Door) -> None:
    ns = door.open()
    (block,) = chain(ns, 1)
    wrong = replace(block, checksums=[b"\0" * 16] * 3)
    assert door.do(door.client.put(ns, [wrong])) == [PutOutcome.CORRUPT]
    assert door.do(door.client.match(ns, [block.key])).hit_blocks == 0


def test_a_block_without_its_parent_is_refused(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 3)
    assert door.do(door.client.put(ns, blocks[1:])) == [PutOutcome.PARENT_MISSING] * 2


def test_nothing_asked_for_is_an_error(door: Door) -> None:
    ns = door.open()
    assert ns.block_keys(b"") == []
    client = door.client
    lease = door.do(client.acquire(ns, [b"\1" * 32]))
    for call in (
        lambda: client.acquire(ns, ns.block_keys(b"")),
        lambda: client.wait_for(ns, [], 1.0),
        lambda: client.read(lease, []),
        lambda: client.read(lease, [b"\1" * 32], sections=[]),
        lambda: client.put(ns, []),
        lambda: client.reserve(ns, []),
        lambda: client.evict(ns, []),
        lambda: client.ls(ns, limit=0),
    ):
        error = door.fails(call)
        assert type(error) is InvalidRequest, error


def test_a_prompt_shorter_than_a_block_is_matched_with_nothing(door: Door) -> None:
    ns = door.open()
    put_chain(door, ns, 1)
    match = door.do(door.client.match(ns, []))
    assert (match.hit_blocks, match.outcomes, match.residency) == (0, (), ())


def test_keys_of_a_wrong_length_are_an_error(door: Door) -> None:
    ns = door.open()
    (block,) = chain(ns, 1)
    client = door.client
    for call in (
        lambda: client.match(ns, [b"\1" * 32, b"short"]),
        lambda: client.match(ns, ["\1" * 32]),
        lambda: client.put(ns, [replace(block, key=b"short")]),
        lambda: client.put(ns, [replace(block, parent=b"")]),
        lambda: client.reserve(ns, [(block.key, b"short")]),
        lambda: client.write(1, b"short", block.sections),
        lambda: client.evict(ns, [b"short"]),
        lambda: client.ls(b"short"),
    ):
        error = door.fails(call)
        assert type(error) is InvalidRequest, error
        assert "32 bytes" in str(error)


def test_sections_that_the_layout_lacks_are_an_error(door: Door) -> None:
    ns = door.open()
    blocks = put_chain(door, ns, 1)
    lease = door.do(door.client.acquire(ns, keys_of(blocks)))
    for wrong in ([3], [-1], ["main"]):
        error = door.fails(lambda wrong=wrong: door.client.read(lease, lease.keys, wrong))
        assert type(error) is InvalidRequest


def test_a_namespace_that_was_not_opened_is_an_error(door: Door) -> None:
    descriptor = fresh_namespace()
    stranger = NamespaceHandle(namespace_id(descriptor), descriptor)
    for call in (
        lambda: door.client.match(stranger, [b"\1" * 32]),
        lambda: door.client.acquire(stranger, [b"\1" * 32]),
        lambda: door.client.put(stranger, chain(stranger, 1)),
        lambda: door.client.reserve(stranger, [(b"\1" * 32, stranger.id)]),
    ):
        error = door.fails(call)
        assert type(error) is UnknownNamespace
        assert stranger.id.hex()[:8] in str(error)


def test_a_block_in_another_layout_is_an_error(door: Door) -> None:
    other = Layout((SectionSpec(0, "main", 2, 8),), block_tokens=16)
    ns = door.open()
    kept = put_chain(door, ns, 1)
    strange = NamespaceHandle(ns.id, replace(ns.namespace, layout=other))
    # The client believes the handle; the store knows what it opened.
    error = door.fails(lambda: door.client.put(strange, chain(strange, 1, seed=1)))
    assert type(error) is WrongSectionSize
    assert door.do(door.client.match(ns, keys_of(kept))).hit_blocks == 1


def test_a_wrong_section_size_changes_nothing(door: Door) -> None:
    ns = door.open()
    blocks = chain(ns, 3)
    cut = [*blocks[2].sections[:2], blocks[2].sections[2][:-1]]
    for sections in (cut, blocks[2].sections[:2], [*blocks[2].sections, b"x"]):
        wrong = [*blocks[:2], replace(blocks[2], sections=sections)]
        error = door.fails(lambda wrong=wrong: door.client.put(ns, wrong))
        assert type(error) is WrongSectionSize
        assert "block 2" in str(error)
    assert door.do(door.client.match(ns, keys_of(blocks))).hit_blocks == 0


def test_a_wrong_section_size_is_refused_in_a_reservation(door: Door) -> None:
    ns = door.open()
    (block,) = chain(ns, 1)
    grant = door.do(door.client.reserve(ns, [(block.key, block.parent)]))
    error = door.fails(
        lambda: door.client.write(grant.reservation_id, block.key, block.sections[:2])
    )
    assert type(error) is WrongSectionSize
    door.do(door.client.write(grant.reservation_id, block.key, block.sections))
    assert door.do(door.client.commit(grant.reservation_id)) == [STORED]


def test_scattered_arrays_are_an_error(door: Door) -> None:
    ns = door.open()
    (block,) = chain(ns, 1)
    scattered = [np.zeros(2 * n, np.uint8)[::2] for n in SMALL.section_bytes]
    error = door.fails(lambda: door.client.put(ns, [replace(block, sections=scattered)]))
    assert type(error) is InvalidRequest
    assert "contiguous" in str(error)


@pytest.mark.parametrize("blocks", [2, 1000])
def test_a_child_before_its_parent_changes_nothing(door: Door, blocks: int) -> None:
    ns = door.open()
    put = chain(ns, blocks)
    swapped = [*put[1:], put[0]]
    error = door.fails(lambda: door.client.put(ns, swapped))
    assert type(error) is BlockOutOfOrder
    assert door.do(door.client.match(ns, keys_of(put))).hit_blocks == 0


def test_a_block_beyond_a_message_is_an_error(door: Door) -> None:
    wide = Layout((SectionSpec(0, "main", 1, 4096), SectionSpec(1, "main", 2, 2)), 32)
    ns = door.open(wide)
    (block,) = chain(ns, 1)
    if door.url.startswith("file"):
        # There are no messages there.
        assert door.do(door.client.put(ns, [block])) == [STORED]
        return
    error = door.fails(lambda: door.client.put(ns, [block]))
    assert type(error) is MessageTooLarge
    assert f"one block {'takes 131280' if 'grpc' in door.url else 'has 131104'} B" in str(error)
    assert f"{'message' if 'grpc' in door.url else 'frame'}_bytes_max" in str(error)
    assert door.do(door.client.match(ns, [block.key])).hit_blocks == 0


def test_a_closed_client_says_so(door: Door) -> None:
    ns = door.open()
    door.do(door.client.close())
    door.do(door.client.close())
    error = door.fails(lambda: door.client.match(ns, [b"\1" * 32]))
    assert type(error) is Unavailable
    assert "closed" in str(error)
