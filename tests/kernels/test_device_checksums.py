"""The checksum kernel, run on the host, against xxHash itself."""

import numpy as np
import pytest
import xxhash
from device_host import ORDERS, Guarded
from hypothesis import given
from hypothesis import strategies as st

from kernels.gpu.plan import SPAN_DTYPE, span_table

SIZES = [256, 272, 1008, 1024, 1040, 2032, 2048, 2064, 8704, 17408, 36864, 73728]
SIZES += [1024 * parts + more for parts in (31, 32, 33, 64, 65) for more in (-16, 0, 16, 64)]


def digests(kernels, runs, order=0):
    held = [Guarded.of(run) for run in runs]
    out = Guarded((len(runs), 16), np.uint8)
    table = span_table([h.address for h in held], [len(run) for run in runs])
    kernels.checksum(table, out.address, order)
    out.check()
    return [bytes(d) for d in out.array]


@pytest.mark.parametrize("order", ORDERS)
def test_sections_and_the_sizes_around_every_border(order, host_kernels, seed):
    rng = np.random.default_rng(seed)
    runs = [rng.integers(0, 256, size, np.uint8) for size in SIZES]
    expected = [xxhash.xxh3_128_digest(run.tobytes()) for run in runs]
    assert digests(host_kernels, runs, order) == expected


@given(
    words=st.integers(16, 4500),
    byte=st.integers(0, 255),
    at=st.integers(0),
    bits=st.integers(1, 255),
)
def test_any_size_and_any_changed_byte(host_kernels, words, byte, at, bits):
    run = np.full(words * 16, byte, np.uint8)
    changed = run.copy()
    changed[at % len(run)] ^= bits
    expected = [xxhash.xxh3_128_digest(r.tobytes()) for r in (run, changed)]
    assert digests(host_kernels, [run, changed]) == expected


def test_an_empty_entry_leaves_its_digest_alone(host_kernels):
    out = Guarded((2, 16), np.uint8, fill=9)
    host_kernels.checksum(np.zeros(2, SPAN_DTYPE), out.address)
    assert (out.array == 9).all()


@pytest.mark.parametrize(
    ("address", "size", "words"),
    [
        (0, 240, "240 bytes"),
        (0, 264, "264 bytes"),
        (0, 1 << 31, "bytes to hash"),
        (8, 256, "at 0x8"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(address, size, words):
    with pytest.raises(ValueError, match=words):
        span_table([address], [size])
