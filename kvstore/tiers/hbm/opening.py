"""Which devices a configuration means, and whether they are here."""

from collections.abc import Callable
from dataclasses import dataclass

from kvstore.config import HbmConfig
from kvstore.errors import ConfigError
from kvstore.tiers.hbm.device import Device, DeviceError, NoDevice
from kvstore.tiers.hbm.simulated import SimulatedDevice
from kvstore.tiers.hbm.tier import HbmTier

FindDevices = Callable[[HbmConfig], list[Device]]


@dataclass(frozen=True, slots=True)
class OpenedHbm:
    """`tier`: None where there is none. `note`: what there is, or why not, for logs and `stat`."""

    tier: HbmTier | None
    note: str


def cuda_devices(config: HbmConfig) -> list[Device]:
    """The CUDA devices that `config` names. Raises `NoDevice` where CuPy, the driver or one of the
    devices is missing."""
    from kvstore.tiers.hbm.cupy_device import find_devices

    return find_devices(config.devices)


def simulated_devices(config: HbmConfig) -> list[Device]:
    """Simulated ones by the same indices."""
    return [SimulatedDevice(i) for i in config.devices]


def open_hbm(config: HbmConfig, find: FindDevices | None = None) -> OpenedHbm:
    """The tier that `config` describes; blocks while the device's libraries are loaded. `find`
    stands in for looking at the machine.

    Raises `ConfigError` where devices that are asked for are not here, or lack memory.
    """
    if config.device == "off":
        return OpenedHbm(None, "hbm: absent, hbm.device is off")
    if find is None:
        find = simulated_devices if config.device == "simulated" else cuda_devices
    try:
        tier = HbmTier(find(config), config.budget_bytes)
    except NoDevice as e:
        if config.device == "auto":
            return OpenedHbm(None, f"hbm: absent, {e}")
        raise ConfigError(
            f"hbm.device is {config.device}, but {e}; or set hbm.device to off, or to simulated "
            "for a device that is host memory"
        ) from e
    except DeviceError as e:
        if config.device == "auto":
            return OpenedHbm(None, f"hbm: absent, its memory can't be had: {e}")
        raise ConfigError(
            f"hbm.budget_bytes {config.budget_bytes}: {e}; lower it, or free the device's memory"
        ) from e
    return OpenedHbm(tier, f"hbm: {tier.name}")
