"""`kernels.gpu` against the oracles, on a simulated device and, marked gpu, on a real one."""

import numpy as np
import pytest
import xxhash
from simulated_cupy import SimulatedCupy

from kernels import codec, gpu, reference
from kernels import engine_reference as oracle
from kernels.engine_records import ENGINE_RECORDS, INDEX_MXFP4, MAIN_FP8, MAIN_NVFP4, PageLayout
from kernels.gpu import runtime
from kernels.layout import KINDS

F32 = np.float32


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def cp(request, monkeypatch):
    """CuPy over a simulated device, or the real one."""
    if request.param == "cuda":
        try:
            yield runtime.cupy()
        except gpu.GpuUnavailableError as error:
            pytest.skip(str(error))
        return
    simulated = SimulatedCupy(request.getfixturevalue("host_kernels"))
    caches = (runtime._module, runtime._function)
    monkeypatch.setattr(runtime, "cupy", lambda: simulated)
    for each in caches:
        each.cache_clear()
    yield simulated
    for each in caches:
        each.cache_clear()


def wild_rows(seed, rows, channels):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, (rows, channels), np.uint32).view(F32)
    usual = rng.standard_normal((rows, channels)).astype(F32)
    return np.where(rng.random((rows, 1)) < 0.5, usual, bits)


@pytest.mark.parametrize("values", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 130])
def test_records_are_the_oracles(cp, kind, values, rows, seed):
    channels = 128 if kind == "mxfp4" else 512
    x = wild_rows(seed, rows, channels)
    x = x if values == "float32" else reference.to_bfloat16(x)
    expected = np.empty((rows, KINDS[kind].record_bytes(channels)), np.uint8)
    reference.quantize_into(KINDS[kind], x, expected)
    records = gpu.quantize(kind, cp.asarray(x))
    np.testing.assert_array_equal(cp.asnumpy(records), expected)

    any_records = np.random.default_rng(seed).integers(0, 256, expected.shape, np.uint8)
    for given in (expected, any_records):
        wanted = np.empty_like(x)
        reference.dequantize_into(KINDS[kind], given, wanted)
        out = cp.empty(x.shape, x.dtype)
        assert gpu.dequantize(kind, cp.asarray(given), values, out) is out
        assert cp.asnumpy(out).tobytes() == wanted.tobytes()


def test_leading_dimensions_are_free_and_may_be_empty(cp):
    x = cp.asarray(np.zeros((2, 3, 5, 64), F32))
    assert gpu.quantize("nvfp4", x).shape == (2, 3, 5, 36)
    assert gpu.quantize("nvfp4", cp.empty((4, 0, 64), F32)).shape == (4, 0, 36)
    assert gpu.dequantize("nvfp4", cp.empty((0, 36), np.uint8)).shape == (0, 64)


def test_wrong_arrays_are_named(cp):
    x = cp.zeros((4, 512), F32)
    with pytest.raises(TypeError, match="x is a ndarray; pass an array on a CUDA device"):
        gpu.quantize("nvfp4", np.zeros((4, 512), F32))
    with pytest.raises(TypeError, match="x is float64; pass float32 or uint16"):
        gpu.quantize("nvfp4", cp.zeros((4, 512), np.float64))
    with pytest.raises(ValueError, match="record kind 'fp5' is unknown"):
        gpu.quantize("fp5", x)
    with pytest.raises(ValueError, match="not C-contiguous"):
        gpu.quantize("nvfp4", cp.zeros((4, 1024), F32)[:, ::2])
    with pytest.raises(ValueError, match="a device needs a multiple of 16"):
        gpu.quantize("nvfp4", cp.zeros(513, F32)[1:])
    with pytest.raises(ValueError, match=r"out has shape \(4, 272\); this result has \(4, 288\)"):
        gpu.quantize("nvfp4", x, cp.zeros((4, 272), np.uint8))
    with pytest.raises(TypeError, match="out is float32"):
        gpu.quantize("nvfp4", x, x)
    raw = cp.zeros(4 * 2048, np.uint8)
    with pytest.raises(ValueError, match="out overlaps the input"):
        gpu.quantize("nvfp4", raw.view(F32).reshape(4, 512), raw[: 4 * 288].reshape(4, 288))
    with pytest.raises(ValueError, match="no dimension"):
        gpu.quantize("nvfp4", cp.zeros((), F32))
    with pytest.raises(ValueError, match="out_dtype 'float16' is unknown"):
        gpu.dequantize("nvfp4", cp.zeros((4, 288), np.uint8), "float16")
    with pytest.raises(ValueError, match="289 bytes"):
        gpu.dequantize("nvfp4", cp.zeros((4, 289), np.uint8))


class Pools:
    """Two layers with pages of different sizes and sections of 128 and 256 rows."""

    def __init__(self, cp, record, split, seed):
        self.record = record
        rng = np.random.default_rng(seed)
        self.layers = []
        for page_rows, section_rows in ((64, 128), (256, 256)):
            layout = PageLayout(record, page_rows, split)
            shape = (6, page_rows)
            records = oracle.rows(record, rng.standard_normal((*shape, record.channels), F32))
            pages = np.zeros((6, layout.page_bytes), np.uint8)
            oracle.write_pages(layout, records, pages)
            slots = rng.permutation(6)[: 2 * section_rows // page_rows] * page_rows
            slots = slots.reshape(2, -1)
            pool = cp.asarray(pages)
            sections = cp.zeros((2, section_rows, record.section_row_bytes), np.uint8)
            moves = gpu.pool_moves(layout, pool, slots, list(sections), section_rows)
            rows = (slots[..., None] + np.arange(min(page_rows, section_rows))).reshape(2, -1)
            flat = records.reshape(-1, record.row_bytes)
            wanted = oracle.section_rows(record, flat[rows])
            self.layers.append((layout, pool, sections, moves, rows, flat, wanted))

    @property
    def moves(self):
        return [layer[3] for layer in self.layers]

    def check_gathered(self, cp):
        for _, _, sections, _, _, _, wanted in self.layers:
            np.testing.assert_array_equal(cp.asnumpy(sections), wanted)

    def check_scattered(self, cp):
        for layout, pool, _, _, rows, flat, wanted in self.layers:
            flat = flat.copy()
            flat[rows] = oracle.engine_rows(self.record, wanted)
            pages = cp.asnumpy(pool)
            np.testing.assert_array_equal(
                oracle.read_pages(layout, pages).reshape(flat.shape), flat
            )


@pytest.mark.parametrize("split", [False, True], ids=["interleaved", "split"])
@pytest.mark.parametrize("name", sorted(ENGINE_RECORDS))
def test_one_launch_serves_layers_with_different_pages(cp, name, split, seed):
    record = ENGINE_RECORDS[name]
    pools = Pools(cp, record, split, seed)
    launches = gpu.PageMoves(record, 16, split=split)
    launches.load(pools.moves)
    launches.gather()
    pools.check_gathered(cp)
    launches.scatter()
    pools.check_scattered(cp)


def test_a_captured_gather_is_replayed_with_new_tables(cp, seed):
    first, second = (Pools(cp, MAIN_FP8, True, seed + i) for i in range(2))
    stream = cp.cuda.Stream()
    launches = gpu.PageMoves(MAIN_FP8, 16, split=True)
    launches.warm_up()
    hashes = gpu.Checksums(8)
    hashes.warm_up()
    with stream:
        launches.load(first.moves[:1])
        hashes.load(list(first.layers[0][2]))
        stream.synchronize()
        stream.begin_capture()
        launches.gather()
        hashes.run()
        with pytest.raises(RuntimeError, match="load the table before the capture"):
            launches.load(second.moves)
        graph = stream.end_capture()
        for pools in (first, second):
            launches.load(pools.moves)
            runs = [section for layer in pools.layers for section in layer[2]]
            hashes.load(runs)
            graph.launch(stream)
            stream.synchronize()
            pools.check_gathered(cp)
            wanted = [xxhash.xxh3_128_digest(cp.asnumpy(run).tobytes()) for run in runs]
            got = cp.asnumpy(hashes.digests)
            assert [bytes(d) for d in got[: len(runs)]] == wanted
        untouched = second.layers[1][2]
        untouched[...] = 0
        launches.load(second.moves[:1])
        graph.launch(stream)
        stream.synchronize()
        assert not cp.asnumpy(untouched).any()


def test_a_captured_conversion_is_replayed(cp, seed):
    x = cp.asarray(wild_rows(seed, 64, 512))
    stream = cp.cuda.Stream()
    gpu.warm_up(["quantize_nvfp4_float32"])
    out = cp.zeros((64, 288), np.uint8)
    with stream:
        stream.begin_capture()
        gpu.quantize("nvfp4", x, out)
        graph = stream.end_capture()
        assert not cp.asnumpy(out).any()
        graph.launch(stream)
        stream.synchronize()
    expected = codec.quantize("nvfp4", cp.asnumpy(x))
    np.testing.assert_array_equal(cp.asnumpy(out), expected)


def test_outside_a_capture_a_launch_covers_what_is_loaded(cp, seed):
    if not isinstance(cp, SimulatedCupy):
        pytest.skip("grids are seen on the simulated device")
    pools = Pools(cp, MAIN_NVFP4, True, seed)
    launches = gpu.PageMoves(MAIN_NVFP4, 100, split=True)
    launches.gather()
    assert cp.launches == []
    launches.load(pools.moves)
    launches.gather()
    count = sum(len(moves.table) for moves in pools.moves)
    assert cp.launches == [("gather_main_nvfp4", (16, count))]


def test_moves_that_do_not_fit_are_refused(cp, seed):
    pools = Pools(cp, MAIN_NVFP4, True, seed)
    layout, pool, sections, moves, *_ = pools.layers[0]
    with pytest.raises(ValueError, match="these launches are for index_mxfp4"):
        gpu.PageMoves(INDEX_MXFP4, 4, split=True).load([moves])
    with pytest.raises(ValueError, match="split: False"):
        gpu.PageMoves(MAIN_NVFP4, 4, split=False).load([moves])
    with pytest.raises(ValueError, match="room for 2"):
        gpu.PageMoves(MAIN_NVFP4, 2, split=True).load([moves])
    with pytest.raises(ValueError, match="moves of 256 rows; rows_max is 64"):
        gpu.PageMoves(MAIN_NVFP4, 20, split=True, rows_max=64).load(pools.moves)
    with pytest.raises(ValueError, match="two moves have the same section"):
        gpu.PageMoves(MAIN_NVFP4, 20, split=True).load([moves, moves])
    other = cp.zeros((1, 128, 288), np.uint8)
    again = gpu.pool_moves(layout, pool, [[0, 64]], list(other), 128)
    more = gpu.pool_moves(layout, pool, [[64, 128]], [cp.zeros((128, 288), np.uint8)], 128)
    with pytest.raises(ValueError, match="two moves have the same rows of a pool"):
        gpu.PageMoves(MAIN_NVFP4, 20, split=True).load([again, more])
    with pytest.raises(ValueError, match="rows_max 24"):
        gpu.PageMoves(MAIN_NVFP4, 20, split=True, rows_max=24)
    for capacity in (0, 1 << 16):
        with pytest.raises(ValueError, match=f"capacity {capacity}"):
            gpu.PageMoves(MAIN_NVFP4, capacity, split=True)
    with pytest.raises(ValueError, match="its pages have 18432 bytes"):
        gpu.pool_moves(layout, pool.reshape(12, -1), [[0, 64]], list(other), 128)
    with pytest.raises(ValueError, match="a section has 36864 bytes; its rows need 73728"):
        gpu.pool_moves(layout, pool, [[0, 64, 128, 192]], list(other), 256)
    with pytest.raises(ValueError, match="slot 384 is outside"):
        gpu.pool_moves(layout, pool, [[0, 384]], list(other), 128)
    inside = pool.reshape(-1)[: 128 * 288]
    with pytest.raises(ValueError, match="lies in the pool"):
        gpu.pool_moves(layout, pool, [[0, 64]], [inside], 128)
    assert sections.shape == (2, 128, 288)


def test_sections_are_hashed_where_they_lie(cp, seed):
    rng = np.random.default_rng(seed)
    sizes = (8704, 17408, 36864, 73728)
    runs = [rng.integers(0, 256, size, np.uint8) for size in sizes]
    hashes = gpu.Checksums(10)
    hashes.run()
    hashes.load([cp.asarray(run) for run in runs])
    hashes.run()
    digests = cp.asnumpy(hashes.digests)
    assert [bytes(d) for d in digests[:4]] == [xxhash.xxh3_128_digest(r.tobytes()) for r in runs]
    assert not digests[4:].any()
    with pytest.raises(ValueError, match="128 bytes to hash"):
        hashes.load([cp.zeros(128, np.uint8)])
    with pytest.raises(TypeError, match="run is float32"):
        hashes.load([cp.zeros(128, F32)])


@pytest.mark.gpu
def test_arrays_of_torch_are_taken_without_a_copy(seed):
    if not gpu.available():
        pytest.skip("needs CuPy and a device")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    x = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    expected = codec.quantize("nvfp4", x.cpu().numpy())
    np.testing.assert_array_equal(gpu.quantize("nvfp4", x).get(), expected)


def test_an_old_device_is_named(cp, monkeypatch):
    if not isinstance(cp, SimulatedCupy):
        pytest.skip("the real device is new enough")
    monkeypatch.setattr(runtime, "COMPUTE_CAPABILITY_MIN", 100)
    with pytest.raises(gpu.GpuUnavailableError, match=r"compute capability 9.0; the kernels need"):
        gpu.warm_up(["checksum"])
