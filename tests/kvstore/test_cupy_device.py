"""The CuPy device: on a simulated runtime here, and on CUDA where a device is (marked gpu)."""

import multiprocessing
import os
import sys

import numpy as np
import pytest
from simulated_cuda import CUDARuntimeError, SimulatedCuda
from test_tiers_hbm import transfer

from kvstore.config import HbmConfig
from kvstore.testing.tiers import PoolTierContract
from kvstore.tiers.base import PAGE_BYTES
from kvstore.tiers.dram import DramTier
from kvstore.tiers.hbm import HbmTier, cupy_device
from kvstore.tiers.hbm.cupy_device import CupyDevice, IpcPool, find_devices
from kvstore.tiers.hbm.device import DeviceError, NoDevice
from kvstore.tiers.hbm.opened import OpenedHbm
from kvstore.tiers.hbm.opening import open_hbm

WAIT_S = 20.0


@pytest.fixture
def cuda(monkeypatch):
    simulated = SimulatedCuda()
    monkeypatch.setattr(cupy_device, "_cupy", lambda: simulated.cupy)
    return simulated


def real_devices(indices=(0,)):
    try:
        return find_devices(indices)
    except NoDevice as e:
        pytest.skip(f"no CUDA device: {e}")


class OnCupy(PoolTierContract):
    def devices(self):
        raise NotImplementedError

    def make(self, budget_bytes):
        return HbmTier(self.devices(), budget_bytes)

    def write(self, tier, slot, data):
        transfer(tier, slot, data)

    def read(self, tier, slot, length):
        return transfer(tier, slot, length=length)


class TestOnSimulatedCuda(OnCupy):
    def devices(self):
        return [CupyDevice(SimulatedCuda().cupy, 1)]


@pytest.mark.gpu
class TestOnCuda(OnCupy):
    def devices(self):
        return real_devices()


def test_copies_go_to_the_device_that_holds_the_slot(cuda):
    tier = HbmTier(find_devices((0, 1)), 2 * PAGE_BYTES)
    slots = [tier.alloc(2 * PAGE_BYTES) for _ in range(2)]
    for i, slot in enumerate(slots):
        transfer(tier, slot, bytes([i + 1]) * 2 * PAGE_BYTES)
    for i, slot in enumerate(slots):
        assert transfer(tier, slot, length=2 * PAGE_BYTES) == bytes([i + 1]) * 2 * PAGE_BYTES
    assert tier.name == "Simulated CUDA (CUDA device 0), Simulated CUDA (CUDA device 1)"
    tier.close()
    assert not cuda._allocated


def test_an_event_that_is_late_is_waited_for_and_a_deadline_kept(cuda):
    (device,) = find_devices((0,))
    device.allocate(PAGE_BYTES)
    stream = device.stream()
    cuda.late = 3
    stream.copy_in(0, memoryview(b"bytes"))
    event = stream.record()
    assert not event.done()
    assert event.wait(WAIT_S)
    cuda.late = 1 << 60
    assert not stream.record().wait(0.01)
    device.close()


def test_an_error_is_no_not_yet(cuda):
    (device,) = find_devices((0,))
    device.allocate(PAGE_BYTES)
    event = device.stream().record()
    cuda.status = 700
    with pytest.raises(DeviceError, match="CUDA error 700"):
        event.wait(WAIT_S)
    device.close()


def test_what_cuda_refuses_is_a_device_error(cuda):
    (device,) = find_devices((0,))
    device.allocate(PAGE_BYTES)
    with pytest.raises(DeviceError, match="already"):
        device.allocate(PAGE_BYTES)
    stream = device.stream()
    with pytest.raises(DeviceError, match="leave the pool"):
        stream.copy_in(PAGE_BYTES - 1, memoryview(b"12"))
    cuda.refuse = CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access")
    with pytest.raises(DeviceError, match="illegal memory access"):
        stream.copy_in(0, memoryview(b"12"))
    with pytest.raises(DeviceError, match="illegal memory access"):
        stream.record()
    with pytest.raises(DeviceError, match="out of memory"):
        HbmTier(find_devices((1,)), 1 << 30)
    assert len(cuda._allocated) == 1


def test_the_arena_is_pinned_once_for_all_devices_and_let_go(cuda):
    devices = find_devices((0, 1))
    arena = DramTier(4 * PAGE_BYTES)
    for device in devices:
        device.register(arena.memory)
    assert list(cuda.registered.values()) == [(4 * PAGE_BYTES, 1)]
    for device in devices:
        device.close()
    assert not cuda.registered
    arena.close()


def test_devices_that_are_not_there(cuda, monkeypatch):
    with pytest.raises(NoDevice, match="2 CUDA devices here, and no device 5"):
        find_devices((0, 5))
    cuda.devices = 0
    with pytest.raises(NoDevice, match=r"no CUDA device here .*cudaErrorNoDevice"):
        find_devices((0,))
    opened = open_hbm(HbmConfig())
    assert (opened.tier, "absent, there is no CUDA device" in opened.note) == (None, True)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NoDevice, match=r"CuPy can't be imported .*; install the extra cuda12"):
        find_devices((0,))


def test_a_pool_is_opened_on_the_device_with_the_same_bus(cuda):
    tier = HbmTier(find_devices((1,)), 4 * PAGE_BYTES)
    slot = tier.alloc(PAGE_BYTES)
    transfer(tier, slot, b"over there")
    shared = tier.share()
    (handle,) = shared.pools
    assert (handle.kind, handle.device, handle.size_bytes) == ("cuda", 1, 4 * PAGE_BYTES)
    opened = OpenedHbm.by_handles(shared.pools, shared.generations)
    (pool,) = opened.pools
    assert isinstance(pool, IpcPool)
    assert pool._device == 1
    into = bytearray(10)
    found = opened.place(slot.offset, PAGE_BYTES)
    assert found is not None
    pool.copy_out(memoryview(into), found[1])
    assert into == b"over there"
    assert opened.intact([(slot.offset, slot.generation)])
    tier.free(slot)
    assert not opened.intact([(slot.offset, slot.generation)])
    with pytest.raises(DeviceError, match="leave the pool"):
        pool.copy_out(memoryview(bytearray(2)), 4 * PAGE_BYTES - 1)
    opened.close()
    assert not cuda.opened
    tier.close()
    # others may have it open still
    assert len(cuda._allocated) == 1
    cuda._allocated.clear()
    with pytest.raises(DeviceError, match="can't be opened"):
        IpcPool(handle)
    with pytest.raises(DeviceError, match="can't be opened"):
        OpenedHbm.by_handles(shared.pools, shared.generations)
    with pytest.raises(DeviceError, match="can't be mapped"):
        OpenedHbm([], shared.generations)


def test_a_pool_is_read_in_its_own_process_without_a_handle(cuda):
    tier = HbmTier(find_devices((0, 1)), 2 * PAGE_BYTES)
    slots = [tier.alloc(2 * PAGE_BYTES) for _ in range(2)]
    for i, slot in enumerate(slots):
        transfer(tier, slot, bytes([i + 1]) * 2 * PAGE_BYTES)
    view = tier.view()
    assert view.kind == "cuda"
    for i, slot in enumerate(slots):
        pool, at = view.place(slot.offset, PAGE_BYTES)
        into = bytearray(PAGE_BYTES)
        pool.copy_out(memoryview(into), at)
        assert into == bytes([i + 1]) * PAGE_BYTES
        assert view.intact([(slot.offset, slot.generation)])
    tier.free(slots[0])
    assert not view.intact([(slots[0].offset, slots[0].generation)])
    view.close()
    tier.close()
    # nothing was exported, so that the memory could be given back
    assert not cuda._allocated
    assert not cuda.opened


def _read_in_another_process(pools, generations, offset, generation, answers):
    opened = OpenedHbm.by_handles(pools, generations)
    array = opened.array(offset, PAGE_BYTES)
    total = int(array.astype("uint64").sum())
    answers.put((opened.kind, total, opened.intact([(offset, generation)])))
    del array
    opened.close()


@pytest.mark.gpu
def test_two_processes_share_a_pool_by_ipc():
    tier = HbmTier(real_devices(), 64 * PAGE_BYTES)
    tier.alloc(PAGE_BYTES)
    slot = tier.alloc(PAGE_BYTES)
    data = np.random.default_rng(0).integers(0, 256, PAGE_BYTES, np.uint8)
    transfer(tier, slot, data.tobytes())
    shared, context = tier.share(), multiprocessing.get_context("spawn")
    answers = context.Queue()
    arguments = (shared.pools, shared.generations, slot.offset, slot.generation, answers)
    other = context.Process(target=_read_in_another_process, args=arguments)
    other.start()
    assert answers.get(timeout=60) == ("cuda", int(data.sum(dtype=np.uint64)), True)
    other.join(60)
    tier.close()


@pytest.mark.gpu
def test_copies_between_a_pinned_arena_and_a_device():
    (device,) = real_devices()
    arena = DramTier(1 << 24)
    tier = HbmTier([device], 1 << 24)
    device.register(arena.memory)
    there, back = arena.alloc(1 << 22), arena.alloc(1 << 22)
    data = os.urandom(1 << 22)
    arena.view(there)[:] = data
    slot = tier.alloc(1 << 22)
    _, offset = tier.place(slot)
    with tier.stream(0) as stream:
        stream.copy_in(offset, arena.view(there))
        stream.copy_out(arena.view(back), offset)
        assert stream.record().wait(WAIT_S)
    assert arena.view(back) == data
    tier.close()
    arena.close()
