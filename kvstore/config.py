"""Every setting of the store and the daemon: frozen, validated, limits named with their unit last.
A class's docstring says what each is, behind its name and a colon; docs/settings.md comes from it.

An unknown key, a wrong type and a value out of range are a `ConfigError` that names the key and
what is known there. Sizes are bytes, as an integer or with a unit ("64MiB", "1.5GB").
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from kvstore.block import Tier
from kvstore.errors import ConfigError

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_BYTES_MAX = 1 << 62
"""Sizes, and sums of a few of them, stay within the system's 64-bit offsets."""
_MESSAGE_BYTES_MAX = 2 * _GIB - 1
"""gRPC counts a message's bytes in 32 bits with a sign."""
_WINDOWS_DRAM_FRACTION = 10
_BYTE_SIZE = TypeAdapter(ByteSize)


def _parse_bytes(value: object) -> int:
    if isinstance(value, bool):
        raise ValueError("a size is a number of bytes, not a boolean")
    return int(_BYTE_SIZE.validate_python(value))


Bytes = Annotated[int, BeforeValidator(_parse_bytes), Field(ge=0, le=_BYTES_MAX)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def _check_order(settings: BaseModel, low: str, high: str) -> None:
    least, most = getattr(settings, low), getattr(settings, high)
    if least > most:
        raise ValueError(
            f"{low} {least:g} is above {high} {most:g}; lower the one or raise the other"
        )


def _parse_directory(value: object) -> object:
    # it would be the working directory, which nobody means
    if value == "":
        raise ValueError("an empty path is no directory; name one, or leave it out for DRAM only")
    return value


def _parse_indices(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise ValueError("write indices as 0,1") from None


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class DramConfig(_Settings):
    """The arena. `budget_bytes`: all the memory that block payloads take. `held_fraction_max`:
    how much of it readers on this host may keep from eviction with their leases."""

    budget_bytes: Annotated[Bytes, Field(ge=64 * _KIB)] = 1 * _GIB
    held_fraction_max: Annotated[float, Field(ge=0, le=1)] = 0.5


class HbmConfig(_Settings):
    """The pools in devices' memory.

    `device`: `cupy`, CUDA devices through CuPy, an error where there are none; `auto`, the same
    where there are some, else no tier; `simulated`, host memory behind a device's rules, for tests
    and demonstrations; `off`. `devices`: which, by index ("0,1"). `budget_bytes`: memory of each of
    them, taken once at start. `copy_bytes_max`: bytes on their way into HBM or out of it for
    promotion and demotion at a time. `copy_s_max`: a copy that takes longer means that the device
    hangs, and the tier is given up. `candidates_max`: blocks that wait to be copied in; more are
    passed over. `copy_workers`: threads that queue copies and wait for them. `held_fraction_max`:
    how much of the pools readers on this host may keep from eviction with their leases.
    """

    device: Literal["auto", "cupy", "simulated", "off"] = "auto"
    devices: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        BeforeValidator(_parse_indices),
        Field(min_length=1),
    ] = (0,)
    budget_bytes: Annotated[Bytes, Field(ge=4 * _KIB)] = 1 * _GIB
    copy_bytes_max: Annotated[Bytes, Field(ge=4 * _KIB)] = 32 * _MIB
    copy_s_max: Seconds = 10.0
    candidates_max: Count = 65_536
    copy_workers: Count = 2
    held_fraction_max: Annotated[float, Field(ge=0, le=1)] = 0.5

    @model_validator(mode="after")
    def _once_each(self) -> "HbmConfig":
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices {list(self.devices)} names one of them twice")
        return self


class SsdConfig(_Settings):
    """The log of segments and its index.

    `budget_bytes`: hard limit of real bytes on disk, segments and index together.
    `segment_bytes`: size of one segment file, the unit in which space comes back; one segment of
    the budget is kept for compaction. `free_floor_bytes`: free space of the file system that is
    never used. `sync`: where it is off, nothing is durable and no acknowledgement claims it (tests
    only).
    `direct_io`: `auto` uses O_DIRECT where the file system has it. `queue_depth_max`: reads that
    one worker (`migration.read_workers`) has under way at a time. `compression`: of
    frames. `compression_level`: zstd's. `index_map_bytes_max`: address
    space for the LMDB map, not disk space. `lifetime_min_s`: no block younger than this leaves the
    SSD to make room; while such blocks fill the budget, new ones are refused by it. 0: any may go.
    """

    budget_bytes: Annotated[Bytes, Field(ge=1 * _MIB)] = 16 * _GIB
    segment_bytes: Annotated[Bytes, Field(ge=64 * _KIB)] = 64 * _MIB
    free_floor_bytes: Bytes = 1 * _GIB
    sync: bool = True
    direct_io: Literal["auto", "off"] = "auto"
    queue_depth_max: Annotated[int, Field(ge=1, le=1024)] = 16
    compression: Literal["off", "zstd"] = "off"
    compression_level: Annotated[int, Field(ge=-7, le=19)] = 1
    index_map_bytes_max: Annotated[Bytes, Field(ge=1 * _MIB)] = 16 * _GIB
    lifetime_min_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 72 * 3600.0

    @model_validator(mode="after")
    def _fits(self) -> "SsdConfig":
        if self.segment_bytes % (4 * _KIB):
            raise ValueError(f"segment_bytes {self.segment_bytes} is not a multiple of 4096")
        if self.budget_bytes < 3 * self.segment_bytes:
            raise ValueError(
                f"budget_bytes {self.budget_bytes} holds fewer than 3 segments of "
                f"{self.segment_bytes} B: one is written, one is kept for compaction; raise it to "
                f"{3 * self.segment_bytes} or more, or lower segment_bytes"
            )
        return self


class LeaseConfig(_Settings):
    """How long a client's rights last, and how many there may be.

    `lease_ttl_s_default`, `reservation_ttl_s_default`: how long a lease or a reservation lasts
    where the client does not say. `lease_ttl_s_max`, `reservation_ttl_s_max`: the longest that it
    may ask for. `leases_max`, `reservations_max`: how many there are at a time.
    """

    lease_ttl_s_default: Seconds = 60.0
    lease_ttl_s_max: Seconds = 3600.0
    reservation_ttl_s_default: Seconds = 60.0
    reservation_ttl_s_max: Seconds = 600.0
    leases_max: Count = 65_536
    reservations_max: Count = 16_384

    @model_validator(mode="after")
    def _ordered(self) -> "LeaseConfig":
        _check_order(self, "lease_ttl_s_default", "lease_ttl_s_max")
        _check_order(self, "reservation_ttl_s_default", "reservation_ttl_s_max")
        return self


PolicyName = Literal["arc", "gittins", "lru", "s3_fifo", "sieve", "w_tinylfu"]


class EvictionConfig(_Settings):
    """`policy`: the algorithm that picks victims, by its module's name in `kvstore.eviction`.
    `dram_policy`, `ssd_policy`: another one for that tier alone."""

    policy: PolicyName = "gittins"
    dram_policy: PolicyName | None = None
    ssd_policy: PolicyName | None = None

    def policy_of(self, tier: Tier) -> PolicyName:
        """The name for one tier."""
        own: PolicyName | None = getattr(self, f"{str(tier.name).lower()}_policy", None)
        return own or self.policy


class WindowsConfig(_Settings):
    """The window pool: snapshots and hand-over records, in memory alone, for minutes.

    `budget_bytes`: hard limit of the memory they take, beside `dram.budget_bytes`; a tenth of that
    where it is not set, no pool where it is 0. `payload_bytes_max`: the largest object.
    `objects_max`: how many there are at a time. `ttl_s_default`: how long an object stays where its
    writer does not say. `ttl_s_max`: the longest that it may ask for.
    `candidates_max`: snapshots that one lookup tells of. `fill_s_max`: from the first byte of an
    object that comes in several messages to its last.
    """

    budget_bytes: Bytes | None = None
    payload_bytes_max: Annotated[Bytes, Field(ge=4 * _KIB)] = 64 * _MIB
    objects_max: Count = 65_536
    ttl_s_default: Seconds = 600.0
    ttl_s_max: Seconds = 3600.0
    candidates_max: Count = 64
    fill_s_max: Seconds = 60.0

    @model_validator(mode="after")
    def _ordered(self) -> "WindowsConfig":
        _check_order(self, "ttl_s_default", "ttl_s_max")
        return self


class MigrationConfig(_Settings):
    """Queues and workers between the tiers.

    `read_workers`: threads that read from SSD. `verify_workers`: threads that compute checksums.
    `write_back_bytes_max`: dirty bytes that wait or are being written; beyond it puts are refused
    room until the disk catches up. `write_batch_bytes_max`: frames made durable by one sync.
    `load_bytes_max`: bytes on their way from SSD into DRAM at a time, all calls together.
    `read_ahead_bytes_max`: of `load_bytes_max`, what is begun for one lease before it is asked
    for, where its blocks are read in their order; 0: none.
    `bounce_bytes_max`: buffers outside the arena for reads that find it full of pinned blocks.
    `compaction_dead_fraction_min`: a segment with less of it dead is not rewritten while the
    policy's victims can go instead; less of it keeps more blocks and writes them more often.
    `retry_s_min`, `retry_s_max`: shortest and longest back-off after a disk error.
    `cost_refresh_s`: what reading from SSD costs is looked at again, by reading one block, where
    nobody has read for so long.
    """

    read_workers: Count = 4
    verify_workers: Count = 2
    write_back_bytes_max: Annotated[Bytes, Field(ge=64 * _KIB)] = 256 * _MIB
    write_batch_bytes_max: Annotated[Bytes, Field(ge=4 * _KIB)] = 32 * _MIB
    load_bytes_max: Annotated[Bytes, Field(ge=4 * _KIB)] = 128 * _MIB
    read_ahead_bytes_max: Bytes = 32 * _MIB
    bounce_bytes_max: Annotated[Bytes, Field(ge=4 * _KIB)] = 64 * _MIB
    compaction_dead_fraction_min: Annotated[float, Field(ge=0, le=1)] = 0.5
    retry_s_min: Seconds = 0.5
    retry_s_max: Seconds = 30.0
    cost_refresh_s: Seconds = 60.0

    @model_validator(mode="after")
    def _ordered(self) -> "MigrationConfig":
        _check_order(self, "retry_s_min", "retry_s_max")
        return self


class LimitsConfig(_Settings):
    """Bounds on one call and on what the store keeps in memory.

    `keys_per_call_max`: keys or blocks that one call may name. `index_blocks_max`,
    `namespaces_max`: blocks and namespaces that the store knows at a time. `waiters_max`: calls
    that wait for blocks or hand-overs at a time. `wait_s_max`: the longest that one of them may
    ask for. `ls_blocks_max`: blocks that one call lists.
    `read_bytes_max`: payload that one `read` may ask for. `room_wait_s_max`: how long a put or a
    read waits for room that write-back or another call is about to free. `disk_wait_s_max`: how
    long a call waits for the disk; a read misses then, a durable put fails. `drain_s_max`: how long
    closing waits for write-back. `upkeep_s`: between looks at what has expired.
    """

    keys_per_call_max: Count = 65_536
    read_bytes_max: Annotated[Bytes, Field(ge=4 * _KIB)] = 256 * _MIB
    index_blocks_max: Count = 16_000_000
    namespaces_max: Count = 4_096
    waiters_max: Count = 4_096
    wait_s_max: Seconds = 600.0
    room_wait_s_max: Seconds = 10.0
    disk_wait_s_max: Seconds = 20.0
    drain_s_max: Seconds = 60.0
    upkeep_s: Seconds = 0.25
    ls_blocks_max: Count = 10_000


class StoreConfig(_Settings):
    """One store. `dir`: where the SSD tier lives; without it (or without `ssd`) there is none."""

    dir: Annotated[Path | None, BeforeValidator(_parse_directory)] = None
    hbm: HbmConfig = HbmConfig(device="off")
    dram: DramConfig = DramConfig()
    ssd: SsdConfig | None = SsdConfig()
    windows: WindowsConfig = WindowsConfig()
    lease: LeaseConfig = LeaseConfig()
    eviction: EvictionConfig = EvictionConfig()
    migration: MigrationConfig = MigrationConfig()
    limits: LimitsConfig = LimitsConfig()

    @property
    def has_ssd(self) -> bool:
        """Whether an SSD tier is asked for: both its directory and its settings are there."""
        return self.dir is not None and self.ssd is not None

    @property
    def windows_budget_bytes(self) -> int:
        """Memory of the window pool."""
        given = self.windows.budget_bytes
        return self.dram.budget_bytes // _WINDOWS_DRAM_FRACTION if given is None else given


class DataPortConfig(_Settings):
    """The plain stream socket beside gRPC, for block bytes and hot calls.

    `listen`: as `server.listen`; `auto` is the same kind of address: the socket's path with
    `.data` behind it, or a free port. `off`: gRPC carries everything. `share`: readers on this host
    map the arena, and writers hand over theirs (unix sockets and the daemon's own user only).
    `frame_bytes_max`: one frame either way, and a writer's staging area. `connections_max`: at a
    time. `bulk_workers`: threads that move block bytes. `receive_bytes_max`: of
    puts on their way in, all connections together. `handshake_s_max`: until a new connection has
    shown its token. `stall_s_max`: without progress in the middle of a frame. `idle_s_max`:
    between frames. `token_ttl_s`: how long a token of Hello opens connections.
    """

    listen: str = "auto"
    share: bool = True
    frame_bytes_max: Annotated[Bytes, Field(ge=64 * _KIB)] = 64 * _MIB
    receive_bytes_max: Annotated[Bytes, Field(ge=64 * _KIB)] = 256 * _MIB
    connections_max: Count = 256
    bulk_workers: Count = 4
    handshake_s_max: Seconds = 5.0
    stall_s_max: Seconds = 10.0
    idle_s_max: Seconds = 600.0
    token_ttl_s: Seconds = 30.0


class ServerConfig(_Settings):
    """The daemon's door.

    `listen`: `unix:///path` or `tcp://127.0.0.1:port`. `message_bytes_max`: one gRPC message either
    way. `deadline_s_default`: for calls that bring none. `deadline_s_max`: of any; a client that
    waits longer asks again. `drain_s_max`: how long a stopping daemon lets calls finish.
    `calls_max`: calls at a time; more are turned away. `reflection`: whether gRPC clients may ask
    which methods there are. `log_level`: the least grave message that is logged.
    `metrics_listen`: `host:port` for Prometheus, off when empty.
    """

    listen: str = "unix:///tmp/kvstored.sock"
    message_bytes_max: Annotated[Bytes, Field(ge=64 * _KIB, le=_MESSAGE_BYTES_MAX)] = 16 * _MIB
    deadline_s_default: Seconds = 30.0
    deadline_s_max: Seconds = 600.0
    calls_max: Count = 256
    drain_s_max: Seconds = 30.0
    reflection: bool = True
    metrics_listen: str = ""
    data_port: DataPortConfig = DataPortConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class DaemonConfig(StoreConfig):
    """The store's settings at the top level, the daemon's under `server`. A daemon looks for CUDA
    devices by itself; a store inside somebody's process does not take their memory unasked."""

    hbm: HbmConfig = HbmConfig()

    server: ServerConfig = ServerConfig()


_S = TypeVar("_S", bound=_Settings)


def _known_keys(cls: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    for name in path:
        field = cls.model_fields.get(str(name))
        if field is None:
            break
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        nested = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if not nested:
            break
        cls = nested[0]
    return sorted(cls.model_fields)


def _got(value: object) -> str:
    return "" if isinstance(value, Mapping) else f" (got {value!r})"


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    lines = []
    for e in error.errors():
        key = ".".join(str(part) for part in e["loc"]) or "(settings)"
        if e["type"] == "extra_forbidden":
            known = ", ".join(_known_keys(cls, e["loc"][:-1]))
            lines.append(f"unknown key {key!r}; known here: {known}")
        else:
            # a sentence of a validator has its values; pydantic's own does not
            own = e.get("ctx", {}).get("error")
            lines.append(f"{key}: {own or e['msg']}" + _got(e["input"]))
    return "; ".join(lines)


def _merge(into: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        at = into
        for name in parents:
            nested = at.setdefault(name, {})
            if not isinstance(nested, dict):
                raise ConfigError(f"{dotted!r}: {name!r} is no table of settings")
            at = nested
        if isinstance(value, Mapping) and isinstance(at.get(last), dict):
            _merge(at[last], value)
        else:
            at[last] = _merge({}, value) if isinstance(value, Mapping) else value
    return into


def build_config(
    cls: type[_S], settings: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> _S:
    """Validate `settings`; `overrides` win over them and may be nested or dotted
    (`{"dram.budget_bytes": "4GiB"}`).

    Raises `ConfigError` naming every wrong key, and the known ones for an unknown key.
    """
    merged = _merge(_merge({}, settings), overrides or {})
    try:
        return cls.model_validate(merged)
    except ValidationError as e:
        raise ConfigError(_explain(cls, e)) from e


def load_toml(path: Path, overrides: Mapping[str, Any] | None = None) -> DaemonConfig:
    """The daemon's settings from a TOML file, `overrides` (flags) winning over it.

    Raises `ConfigError` where the file can't be read, is no TOML or holds a wrong setting.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"can't read the configuration {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is no TOML: {e}") from e
    try:
        return build_config(DaemonConfig, settings, overrides)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e
