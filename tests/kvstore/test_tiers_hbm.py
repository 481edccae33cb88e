"""The HBM tier on simulated devices: the contract of slots, streams and events, and faults."""

import subprocess
import sys

import pytest

from kvstore.testing.tiers import PoolTierContract
from kvstore.tiers.base import PAGE_BYTES, Slot
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.hbm.device import DeviceError
from kvstore.tiers.hbm.simulated import SimulatedDevice, SimulatedPool

WAIT_S = 20.0


def transfer(tier, slot, data=None, length=0):
    """Write `data` into a slot, or read `length` bytes of it; waits."""
    device, offset = tier.place(slot)
    into = bytearray(length)
    with tier.stream(device) as stream:
        if data is not None:
            stream.copy_in(offset, memoryview(data))
        else:
            stream.copy_out(memoryview(into), offset)
        assert stream.record().wait(WAIT_S)
    return bytes(into)


class OnSimulatedDevices(PoolTierContract):
    devices = 1
    stepped = False

    def make(self, budget_bytes: int) -> HbmTier:
        devices = [SimulatedDevice(i, stepped=self.stepped) for i in range(self.devices)]
        return HbmTier(devices, budget_bytes // self.devices)

    def write(self, tier: HbmTier, slot: Slot, data: bytes) -> None:
        transfer(tier, slot, data)

    def read(self, tier: HbmTier, slot: Slot, length: int) -> bytes:
        return transfer(tier, slot, length=length)


class TestThreaded(OnSimulatedDevices):
    pass


class TestStepped(OnSimulatedDevices):
    stepped = True


class TestTwoDevices(OnSimulatedDevices):
    devices = 2

    # the largest object fits one device, not both together
    test_neighbours_join_when_freed = None


def test_objects_spread_over_devices_and_stay_on_one():
    tier = HbmTier([SimulatedDevice(i) for i in range(3)], 4 * PAGE_BYTES)
    slots = [tier.alloc(3 * PAGE_BYTES) for _ in range(3)]
    assert sorted(tier.place(slot)[0] for slot in slots) == [0, 1, 2]
    assert tier.alloc(2 * PAGE_BYTES) is None
    assert tier.slot_bytes_max == 4 * PAGE_BYTES
    transfer(tier, slots[2], b"here")
    device, offset = tier.place(slots[2])
    assert tier.devices[device].memory[offset : offset + 4] == b"here"
    tier.close()


def test_a_copy_takes_place_when_its_event_is_done_and_not_before():
    device = SimulatedDevice(stepped=True)
    device.allocate(PAGE_BYTES)
    source = bytearray(b"old!")
    stream = device.stream()
    stream.copy_in(0, memoryview(source))
    event = stream.record()
    assert not event.done()
    assert device.memory[:4] == bytes(4)
    source[:] = b"new!"  # what the rules forbid is seen
    assert device.step()
    assert not event.done()
    assert device.step()
    assert event.done()
    assert device.memory[:4] == b"new!"
    assert not device.step()
    device.close()


def test_copies_within_a_pool():
    device = SimulatedDevice()
    device.allocate(2 * PAGE_BYTES)
    device.memory[:3] = b"abc"
    stream = device.stream()
    stream.copy_within(PAGE_BYTES, 0, 3)
    assert stream.record().wait(WAIT_S)
    assert device.memory[PAGE_BYTES : PAGE_BYTES + 3] == b"abc"
    device.close()


def test_a_failed_copy_is_told_by_its_event_alone():
    device = SimulatedDevice(stepped=True)
    device.allocate(PAGE_BYTES)

    def before(op, length):
        if op == "in" and length == 3:
            raise DeviceError("injected")

    device.before = before
    stream = device.stream()
    stream.copy_in(0, memoryview(b"four"))
    first = stream.record()
    stream.copy_in(0, memoryview(b"bad"))
    second = stream.record()
    stream.copy_in(8, memoryview(b"again"))
    third = stream.record()
    assert third.wait(WAIT_S)
    assert first.done()
    with pytest.raises(DeviceError, match="injected"):
        second.done()
    assert device.memory[:4] == b"four"
    device.close()


@pytest.mark.parametrize("stepped", [False, True])
def test_a_device_that_hangs_is_told_by_time(stepped):
    device = SimulatedDevice(stepped=stepped)
    device.allocate(PAGE_BYTES)
    device.hold()
    stream = device.stream()
    stream.copy_in(0, memoryview(b"late"))
    event = stream.record()
    assert not event.wait(0.02)
    device.release()
    assert event.wait(WAIT_S)
    assert device.memory[:4] == b"late"
    device.close()


def test_a_pool_is_taken_once_and_only_where_there_is_memory():
    device = SimulatedDevice()
    device.allocate(PAGE_BYTES)
    with pytest.raises(DeviceError, match="already"):
        device.allocate(PAGE_BYTES)
    device.close()
    with pytest.raises(DeviceError, match="can't be had"):
        HbmTier([SimulatedDevice()], 1 << 62)
    with pytest.raises(ValueError, match="hold no page"):
        HbmTier([SimulatedDevice()], PAGE_BYTES - 1)


OTHER = """
import sys
from kvstore.tiers.hbm.device import PoolHandle
from kvstore.tiers.hbm.simulated import SimulatedPool
kind, device, size, handle = sys.argv[1:]
pool = SimulatedPool(PoolHandle(kind, int(device), int(size), handle.encode()))
array = pool.array(4096, 5)
into = bytearray(5)
pool.copy_out(memoryview(into), 4096)
print(bytes(array).decode(), bytes(into).decode(), array.flags.writeable)
"""


def test_another_process_maps_the_pool_and_can_not_write():
    device = SimulatedDevice()
    device.allocate(2 * PAGE_BYTES)
    device.memory[4096:4101] = b"hello"
    handle = device.export()
    arguments = [handle.kind, str(handle.device), str(handle.size_bytes), handle.handle.decode()]
    done = subprocess.run(
        [sys.executable, "-c", OTHER, *arguments], capture_output=True, text=True, check=False
    )
    assert done.stdout == "hello hello False\n", done.stderr
    device.close()
    with pytest.raises(DeviceError, match="can't be opened"):
        SimulatedPool(handle)


def test_a_handle_of_memory_that_was_replaced_is_refused():
    device, other = SimulatedDevice(0), SimulatedDevice(1)
    device.allocate(PAGE_BYTES)
    handle = device.export()
    device.close()
    other.allocate(PAGE_BYTES)
    # the same descriptor number, other memory
    assert handle.handle.split(b":")[:2] == other.export().handle.split(b":")[:2]
    with pytest.raises(DeviceError, match="is not the memory"):
        SimulatedPool(handle)
    other.close()


def test_a_pool_gives_nothing_beyond_its_end():
    device = SimulatedDevice()
    device.allocate(PAGE_BYTES)
    pool = SimulatedPool(device.export())
    with pytest.raises(DeviceError, match="leave the pool"):
        pool.array(4000, 97)
    pool.close()
    device.close()
