"""Our encoding of the messages with bytes, against protobuf's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.block import BlockPut, Durability, Outcome, Tier
from kvstore.errors import InvalidRequest
from kvstore.server import wire
from kvstore.store.types import BlockFrames
from kvstore.v1 import kvstore_pb2 as pb

DIGESTS = st.binary(min_size=32, max_size=32)
SECTIONS = st.lists(st.binary(min_size=1, max_size=300), min_size=0, max_size=4)


@st.composite
def block_puts(draw: st.DrawFn) -> BlockPut:
    sections = draw(SECTIONS)
    checksums = [draw(st.binary(min_size=16, max_size=16)) for _ in sections]
    return BlockPut(draw(DIGESTS), draw(DIGESTS), sections, checksums)


def as_bytes(block: BlockPut) -> tuple[bytes, bytes, list[bytes], list[bytes]]:
    assert block.checksums is not None
    sections = [bytes(memoryview(s)) for s in block.sections]
    return block.key, block.parent, sections, list(block.checksums)


def block_message(block: BlockPut) -> "pb.BlockPut":
    key, parent, sections, checksums = as_bytes(block)
    return pb.BlockPut(key=key, parent=parent, sections=sections, checksums=b"".join(checksums))


@given(DIGESTS, st.sampled_from(Durability), st.lists(block_puts(), max_size=4))
def test_put_is_what_protobuf_writes_and_reads(
    namespace_id: bytes, durability: Durability, blocks: list[BlockPut]
) -> None:
    theirs = pb.PutRequest(
        namespace_id=namespace_id,
        durability=durability.value,
        blocks=[block_message(b) for b in blocks],
    )
    ours = b"".join(wire.encode_put(namespace_id, durability, blocks))
    assert ours == theirs.SerializeToString()
    decoded = wire.decode_put(ours)
    assert (decoded.namespace_id, decoded.durability) == (namespace_id, durability)
    assert [as_bytes(b) for b in decoded.blocks] == [as_bytes(b) for b in blocks]


@given(st.integers(0, 2**64 - 1), block_puts())
def test_write_is_what_protobuf_writes_and_reads(reservation_id: int, block: BlockPut) -> None:
    theirs = pb.WriteRequest(reservation_id=reservation_id, block=block_message(block))
    ours = b"".join(wire.encode_write(reservation_id, block))
    assert ours == theirs.SerializeToString()
    decoded = wire.decode_write(ours)
    assert decoded.reservation_id == reservation_id
    assert as_bytes(decoded.block) == as_bytes(block)


@given(
    st.lists(
        st.tuples(st.sampled_from(Outcome), st.sampled_from([0, 2, 4, 6]), block_puts()), max_size=4
    )
)
def test_a_read_reply_is_what_protobuf_writes_and_reads(
    blocks: list[tuple[Outcome, int, BlockPut]],
) -> None:
    frames, messages = [], []
    for outcome, tier, block in blocks:
        key, _, sections, checksums = as_bytes(block)
        views = tuple(memoryview(s) for s in sections)
        frames.append(BlockFrames(key, outcome, Tier(tier), views, tuple(checksums)))
        messages.append(
            pb.BlockData(
                outcome=outcome.value, tier=tier, sections=sections, checksums=b"".join(checksums)
            )
        )
    ours = b"".join(wire.encode_read_reply(frames))
    assert ours == pb.ReadReply(blocks=messages).SerializeToString()
    assert wire.decode_read_reply(ours, [f.key for f in frames]) == frames


def test_sections_are_views_into_the_message() -> None:
    block = BlockPut(b"k" * 32, b"p" * 32, [b"s" * 100], [b"c" * 16])
    data = b"".join(wire.encode_put(b"n" * 32, Durability.ACCEPTED, [block]))
    (section,) = wire.decode_put(data).blocks[0].sections
    assert isinstance(section, memoryview)
    assert section.obj is data


def test_unknown_fields_any_order_and_repeated_scalars_are_accepted() -> None:
    block = block_message(BlockPut(b"k" * 32, b"p" * 32, [b"s"], [b"c" * 16]))
    unknown = b"\xa1\x06" + b"8" * 8 + b"\xa5\x06" + b"4" * 4 + b"\xaa\x06\x02hi" + b"\xa8\x06\x07"
    data = (
        pb.PutRequest(blocks=[block]).SerializeToString()
        + pb.PutRequest(durability=1).SerializeToString()
        + unknown
        + pb.PutRequest(namespace_id=b"1" * 32).SerializeToString()
        + pb.PutRequest(namespace_id=b"2" * 32).SerializeToString()
    )
    decoded = wire.decode_put(data)
    assert (decoded.namespace_id, decoded.durability) == (b"2" * 32, Durability.DURABLE)
    assert decoded.blocks[0].key == b"k" * 32


@given(st.binary(max_size=200))
def test_noise_is_refused_or_read_but_nothing_else(data: bytes) -> None:
    for decode in (
        wire.decode_put,
        wire.decode_write,
        lambda d: wire.decode_read_reply(d, [b"k" * 32]),
    ):
        try:
            decode(data)
        except InvalidRequest:
            continue


@given(st.data(), block_puts())
def test_a_cut_message_is_refused_or_shorter(data: st.DataObject, block: BlockPut) -> None:
    whole = b"".join(wire.encode_put(b"n" * 32, Durability.DURABLE, [block]))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        decoded = wire.decode_put(cut)
    except InvalidRequest:
        return
    assert decoded.blocks == []


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.PutRequest(durability=7).SerializeToString(), "Durability 7"),
        (pb.PutRequest(blocks=[pb.BlockPut(sections=[b"x"])]).SerializeToString(), "checksums"),
        (b"\x0a\xff\xff\xff\xff\x0f", "leaves its message"),
        (b"\x0a" + b"\xff" * 11, "varint"),
        (b"\x0b", "wire type 3"),
        (b"\x10", "ends within"),
        (b"\x08\x01", "must be bytes"),
        (b"\x12\x01x", "must be a number"),
    ],
)
def test_what_is_wrong_is_said(message: bytes, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        wire.decode_put(message)


def test_an_answer_for_other_keys_is_refused() -> None:
    data = b"".join(wire.encode_read_reply([BlockFrames(b"k" * 32, Outcome.MISS)]))
    with pytest.raises(InvalidRequest, match="1 blocks, asked for 2"):
        wire.decode_read_reply(data, [b"k" * 32, b"l" * 32])


@given(st.lists(block_puts(), min_size=1, max_size=4))
def test_overheads_are_upper_bounds(blocks: list[BlockPut]) -> None:
    message = wire.encode_put(b"n" * 32, Durability.DURABLE, blocks)
    sections = [s for b in blocks for s in b.sections]
    bound = (
        wire.MESSAGE_OVERHEAD_BYTES
        + len(blocks) * wire.BLOCK_OVERHEAD_BYTES
        + sum(len(s) + wire.SECTION_OVERHEAD_BYTES for s in sections)
    )
    assert wire.parts_bytes(message) <= bound
