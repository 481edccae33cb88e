"""Numbers that no machine can hold: one error of the tree each, no traceback."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import STORE_SETTINGS, Daemon, Door

from kvstore.config import DaemonConfig, build_config
from kvstore.errors import ConfigError, ReservationExpired
from kvstore.store import Engine

SIZES = [
    "dram.budget_bytes",
    "ssd.budget_bytes",
    "ssd.free_floor_bytes",
    "ssd.index_map_bytes_max",
    "migration.load_bytes_max",
    "limits.read_bytes_max",
    "server.message_bytes_max",
]


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("size", ["8EiB", "99999999999999999999GiB", (1 << 62) + 1])
def test_a_size_beyond_64_bits_is_refused(key: str, size: str | int) -> None:
    with pytest.raises(ConfigError, match=key):
        build_config(DaemonConfig, {}, {key: size})


def test_memory_that_no_machine_has_is_a_setting_to_lower() -> None:
    with pytest.raises(ConfigError, match=r"lower dram\.budget_bytes"):
        asyncio.run(Engine.open(build_config(DaemonConfig, {}, {"dram.budget_bytes": 1 << 62})))


@pytest.fixture(scope="module", params=["daemon", "embedded"])
def door(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Door]:
    directory: Path = tmp_path_factory.mktemp("numbers")
    if request.param == "embedded":
        door = Door(f"file://{directory}/store", False, **STORE_SETTINGS)
        yield door
        door.close()
        return
    daemon = Daemon(f"unix://{directory}/kv.sock", None, STORE_SETTINGS).start()
    door = Door(daemon.url, False)
    yield door
    door.close()
    daemon.kill()


CALLS: list[Callable[[Any, int], Any]] = [
    lambda client, number: client.commit(number),
    lambda client, number: client.abort(number),
    lambda client, number: client.write(number, bytes(32), [b""]),
]


@pytest.mark.parametrize("number", [-1, 1 << 64, 1 << 70])
@pytest.mark.parametrize("call", CALLS, ids=["commit", "abort", "write"])
def test_a_reservation_that_can_not_be_is_one_that_is_not_there(
    door: Door, call: Callable[[Any, int], Any], number: int
) -> None:
    assert type(door.fails(lambda: call(door.client, number))) is ReservationExpired


def test_a_limit_beyond_all_blocks_lists_what_is_there(door: Door) -> None:
    assert door.do(door.client.ls(limit=1 << 70)) == []
