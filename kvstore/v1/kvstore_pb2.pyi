from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_MISS: _ClassVar[Outcome]
    OUTCOME_HIT: _ClassVar[Outcome]
    OUTCOME_PENDING: _ClassVar[Outcome]

class PutOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_OUTCOME_STORED: _ClassVar[PutOutcome]
    PUT_OUTCOME_PRESENT: _ClassVar[PutOutcome]
    PUT_OUTCOME_PENDING: _ClassVar[PutOutcome]
    PUT_OUTCOME_NO_SPACE: _ClassVar[PutOutcome]
    PUT_OUTCOME_PARENT_MISSING: _ClassVar[PutOutcome]
    PUT_OUTCOME_CORRUPT: _ClassVar[PutOutcome]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_ACCEPTED: _ClassVar[Durability]
    DURABILITY_DURABLE: _ClassVar[Durability]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_NONE: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_DRAM: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]

class Outlook(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTLOOK_UNKNOWN: _ClassVar[Outlook]
    OUTLOOK_TOOL_CALL: _ClassVar[Outlook]
    OUTLOOK_USER_TURN: _ClassVar[Outlook]
    OUTLOOK_END_OF_SESSION: _ClassVar[Outlook]
OUTCOME_MISS: Outcome
OUTCOME_HIT: Outcome
OUTCOME_PENDING: Outcome
PUT_OUTCOME_STORED: PutOutcome
PUT_OUTCOME_PRESENT: PutOutcome
PUT_OUTCOME_PENDING: PutOutcome
PUT_OUTCOME_NO_SPACE: PutOutcome
PUT_OUTCOME_PARENT_MISSING: PutOutcome
PUT_OUTCOME_CORRUPT: PutOutcome
DURABILITY_ACCEPTED: Durability
DURABILITY_DURABLE: Durability
TIER_NONE: Tier
TIER_HBM: Tier
TIER_DRAM: Tier
TIER_SSD: Tier
OUTLOOK_UNKNOWN: Outlook
OUTLOOK_TOOL_CALL: Outlook
OUTLOOK_USER_TURN: Outlook
OUTLOOK_END_OF_SESSION: Outlook

class HelloRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("version", "instance_id", "message_bytes_max", "deadline_s_max", "data_port")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_MAX_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    version: str
    instance_id: bytes
    message_bytes_max: int
    deadline_s_max: float
    data_port: DataPort
    def __init__(self, version: _Optional[str] = ..., instance_id: _Optional[bytes] = ..., message_bytes_max: _Optional[int] = ..., deadline_s_max: _Optional[float] = ..., data_port: _Optional[_Union[DataPort, _Mapping]] = ...) -> None: ...

class DataPort(_message.Message):
    __slots__ = ("address", "token", "token_ttl_s", "frame_bytes_max", "share")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TTL_S_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    address: str
    token: bytes
    token_ttl_s: float
    frame_bytes_max: int
    share: bool
    def __init__(self, address: _Optional[str] = ..., token: _Optional[bytes] = ..., token_ttl_s: _Optional[float] = ..., frame_bytes_max: _Optional[int] = ..., share: _Optional[bool] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("canonical_json",)
    CANONICAL_JSON_FIELD_NUMBER: _ClassVar[int]
    canonical_json: bytes
    def __init__(self, canonical_json: _Optional[bytes] = ...) -> None: ...

class OpenNamespaceReply(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace_id", "keys")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class TierCost(_message.Message):
    __slots__ = ("tier", "latency_s", "bytes_per_s", "measured")
    TIER_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    tier: int
    latency_s: float
    bytes_per_s: float
    measured: bool
    def __init__(self, tier: _Optional[int] = ..., latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., measured: _Optional[bool] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("hit_blocks", "outcomes", "residency", "block_bytes", "costs", "snapshots")
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    hit_blocks: int
    outcomes: bytes
    residency: bytes
    block_bytes: int
    costs: _containers.RepeatedCompositeFieldContainer[TierCost]
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotRef]
    def __init__(self, hit_blocks: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., residency: _Optional[bytes] = ..., block_bytes: _Optional[int] = ..., costs: _Optional[_Iterable[_Union[TierCost, _Mapping]]] = ..., snapshots: _Optional[_Iterable[_Union[SnapshotRef, _Mapping]]] = ...) -> None: ...

class SnapshotRef(_message.Message):
    __slots__ = ("key", "blocks", "tail_tokens", "payload_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    blocks: int
    tail_tokens: int
    payload_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., blocks: _Optional[int] = ..., tail_tokens: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class WaitForRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "deadline_s")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    deadline_s: float
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "ttl_s", "locate", "locate_hbm")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    LOCATE_FIELD_NUMBER: _ClassVar[int]
    LOCATE_HBM_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    ttl_s: float
    locate: bool
    locate_hbm: bool
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., ttl_s: _Optional[float] = ..., locate: _Optional[bool] = ..., locate_hbm: _Optional[bool] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("lease_id", "blocks", "ttl_s", "match", "slots", "arena_id", "hbm_slots")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    HBM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    blocks: int
    ttl_s: float
    match: MatchReply
    slots: bytes
    arena_id: bytes
    hbm_slots: bytes
    def __init__(self, lease_id: _Optional[int] = ..., blocks: _Optional[int] = ..., ttl_s: _Optional[float] = ..., match: _Optional[_Union[MatchReply, _Mapping]] = ..., slots: _Optional[bytes] = ..., arena_id: _Optional[bytes] = ..., hbm_slots: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "ttl_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ttl_s: float
    def __init__(self, lease_id: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("ttl_s",)
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    ttl_s: float
    def __init__(self, ttl_s: _Optional[float] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("lease_id", "keys", "sections")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    keys: bytes
    sections: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., sections: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockData(_message.Message):
    __slots__ = ("outcome", "tier", "sections", "checksums")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    tier: int
    sections: _containers.RepeatedScalarFieldContainer[bytes]
    checksums: bytes
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., tier: _Optional[int] = ..., sections: _Optional[_Iterable[bytes]] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockData]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockData, _Mapping]]] = ...) -> None: ...

class ReportCorruptRequest(_message.Message):
    __slots__ = ("namespace_id", "key")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    key: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., key: _Optional[bytes] = ...) -> None: ...

class ReportCorruptReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AnsweredRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "outlook", "lasting_blocks")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OUTLOOK_FIELD_NUMBER: _ClassVar[int]
    LASTING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    outlook: Outlook
    lasting_blocks: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., outlook: _Optional[_Union[Outlook, str]] = ..., lasting_blocks: _Optional[int] = ...) -> None: ...

class AnsweredReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BlockPut(_message.Message):
    __slots__ = ("key", "parent", "sections", "checksums")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent: bytes
    sections: _containers.RepeatedScalarFieldContainer[bytes]
    checksums: bytes
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., sections: _Optional[_Iterable[bytes]] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("namespace_id", "durability", "blocks")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    durability: Durability
    blocks: _containers.RepeatedCompositeFieldContainer[BlockPut]
    def __init__(self, namespace_id: _Optional[bytes] = ..., durability: _Optional[_Union[Durability, str]] = ..., blocks: _Optional[_Iterable[_Union[BlockPut, _Mapping]]] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "parents", "ttl_s")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    parents: bytes
    ttl_s: float
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation_id", "outcomes", "ttl_s")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    outcomes: bytes
    ttl_s: float
    def __init__(self, reservation_id: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("reservation_id", "block")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    block: BlockPut
    def __init__(self, reservation_id: _Optional[int] = ..., block: _Optional[_Union[BlockPut, _Mapping]] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation_id", "durability")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    durability: Durability
    def __init__(self, reservation_id: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    def __init__(self, reservation_id: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutWindowRequest(_message.Message):
    __slots__ = ("namespace_id", "key", "request_id", "place", "ttl_s", "payload_bytes", "checksum", "chunk")
    class Place(_message.Message):
        __slots__ = ("parent", "blocks", "tail_tokens")
        PARENT_FIELD_NUMBER: _ClassVar[int]
        BLOCKS_FIELD_NUMBER: _ClassVar[int]
        TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
        parent: bytes
        blocks: int
        tail_tokens: int
        def __init__(self, parent: _Optional[bytes] = ..., blocks: _Optional[int] = ..., tail_tokens: _Optional[int] = ...) -> None: ...
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    key: bytes
    request_id: str
    place: PutWindowRequest.Place
    ttl_s: float
    payload_bytes: int
    checksum: bytes
    chunk: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., request_id: _Optional[str] = ..., place: _Optional[_Union[PutWindowRequest.Place, _Mapping]] = ..., ttl_s: _Optional[float] = ..., payload_bytes: _Optional[int] = ..., checksum: _Optional[bytes] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PutWindowReply(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: PutOutcome
    def __init__(self, outcome: _Optional[_Union[PutOutcome, str]] = ...) -> None: ...

class GetWindowRequest(_message.Message):
    __slots__ = ("namespace_id", "key", "request_id")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    key: bytes
    request_id: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., request_id: _Optional[str] = ...) -> None: ...

class GetWindowReply(_message.Message):
    __slots__ = ("found", "payload_bytes", "checksum", "chunk")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    found: bool
    payload_bytes: int
    checksum: bytes
    chunk: bytes
    def __init__(self, found: _Optional[bool] = ..., payload_bytes: _Optional[int] = ..., checksum: _Optional[bytes] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class WaitWindowRequest(_message.Message):
    __slots__ = ("namespace_id", "request_id", "deadline_s")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    request_id: str
    deadline_s: float
    def __init__(self, namespace_id: _Optional[bytes] = ..., request_id: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class WaitWindowReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class DropWindowRequest(_message.Message):
    __slots__ = ("namespace_id", "key", "request_id")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    key: bytes
    request_id: str
    def __init__(self, namespace_id: _Optional[bytes] = ..., key: _Optional[bytes] = ..., request_id: _Optional[str] = ...) -> None: ...

class DropWindowReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("namespace_id", "keys", "tier")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    keys: bytes
    tier: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tier: _Optional[int] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyReport(_message.Message):
    __slots__ = ("tiers", "corrupt", "unreadable")
    class PerTier(_message.Message):
        __slots__ = ("tier", "frames", "payload_bytes")
        TIER_FIELD_NUMBER: _ClassVar[int]
        FRAMES_FIELD_NUMBER: _ClassVar[int]
        PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
        tier: int
        frames: int
        payload_bytes: int
        def __init__(self, tier: _Optional[int] = ..., frames: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...
    TIERS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[VerifyReport.PerTier]
    corrupt: bytes
    unreadable: int
    def __init__(self, tiers: _Optional[_Iterable[_Union[VerifyReport.PerTier, _Mapping]]] = ..., corrupt: _Optional[bytes] = ..., unreadable: _Optional[int] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("done", "total", "report")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    report: VerifyReport
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ..., report: _Optional[_Union[VerifyReport, _Mapping]] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStat(_message.Message):
    __slots__ = ("tier", "objects", "payload_bytes", "used_bytes", "budget_bytes", "accepting", "cost", "live_bytes", "policy", "refuses_why")
    TIER_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTING_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REFUSES_WHY_FIELD_NUMBER: _ClassVar[int]
    tier: int
    objects: int
    payload_bytes: int
    used_bytes: int
    budget_bytes: int
    accepting: bool
    cost: TierCost
    live_bytes: int
    policy: str
    refuses_why: str
    def __init__(self, tier: _Optional[int] = ..., objects: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., accepting: _Optional[bool] = ..., cost: _Optional[_Union[TierCost, _Mapping]] = ..., live_bytes: _Optional[int] = ..., policy: _Optional[str] = ..., refuses_why: _Optional[str] = ...) -> None: ...

class StatReply(_message.Message):
    __slots__ = ("tiers", "blocks", "namespaces", "leases", "reservations", "pinned_blocks", "dirty_blocks", "write_back_bytes", "lookup_blocks", "puts", "counters", "evicted_ssd_age_s_min", "windows", "notes")
    class LookupBlocksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class PutsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WRITE_BACK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_SSD_AGE_S_MIN_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStat]
    blocks: int
    namespaces: int
    leases: int
    reservations: int
    pinned_blocks: int
    dirty_blocks: int
    write_back_bytes: int
    lookup_blocks: _containers.ScalarMap[str, int]
    puts: _containers.ScalarMap[str, int]
    counters: _containers.ScalarMap[str, int]
    evicted_ssd_age_s_min: float
    windows: WindowsStat
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierStat, _Mapping]]] = ..., blocks: _Optional[int] = ..., namespaces: _Optional[int] = ..., leases: _Optional[int] = ..., reservations: _Optional[int] = ..., pinned_blocks: _Optional[int] = ..., dirty_blocks: _Optional[int] = ..., write_back_bytes: _Optional[int] = ..., lookup_blocks: _Optional[_Mapping[str, int]] = ..., puts: _Optional[_Mapping[str, int]] = ..., counters: _Optional[_Mapping[str, int]] = ..., evicted_ssd_age_s_min: _Optional[float] = ..., windows: _Optional[_Union[WindowsStat, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class WindowsStat(_message.Message):
    __slots__ = ("objects", "payload_bytes", "used_bytes", "budget_bytes")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    objects: int
    payload_bytes: int
    used_bytes: int
    budget_bytes: int
    def __init__(self, objects: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ...) -> None: ...

class LsRequest(_message.Message):
    __slots__ = ("namespace_id", "limit", "after")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    limit: int
    after: bytes
    def __init__(self, namespace_id: _Optional[bytes] = ..., limit: _Optional[int] = ..., after: _Optional[bytes] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("key", "namespace_id", "parent", "depth", "residency", "payload_bytes", "pins", "dirty", "age_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    namespace_id: bytes
    parent: bytes
    depth: int
    residency: int
    payload_bytes: int
    pins: int
    dirty: bool
    age_s: float
    def __init__(self, key: _Optional[bytes] = ..., namespace_id: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ..., residency: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., pins: _Optional[int] = ..., dirty: _Optional[bool] = ..., age_s: _Optional[float] = ...) -> None: ...

class LsReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ...) -> None: ...

class PortOpenRequest(_message.Message):
    __slots__ = ("token", "share", "staging_bytes")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    share: bool
    staging_bytes: int
    def __init__(self, token: _Optional[bytes] = ..., share: _Optional[bool] = ..., staging_bytes: _Optional[int] = ...) -> None: ...

class PortOpenReply(_message.Message):
    __slots__ = ("instance_id", "arena_bytes", "generations_offset", "staging", "hbm_pools", "hbm_generations")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STAGING_FIELD_NUMBER: _ClassVar[int]
    HBM_POOLS_FIELD_NUMBER: _ClassVar[int]
    HBM_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    arena_bytes: int
    generations_offset: int
    staging: bool
    hbm_pools: _containers.RepeatedCompositeFieldContainer[HbmPool]
    hbm_generations: bytes
    def __init__(self, instance_id: _Optional[bytes] = ..., arena_bytes: _Optional[int] = ..., generations_offset: _Optional[int] = ..., staging: _Optional[bool] = ..., hbm_pools: _Optional[_Iterable[_Union[HbmPool, _Mapping]]] = ..., hbm_generations: _Optional[bytes] = ...) -> None: ...

class HbmPool(_message.Message):
    __slots__ = ("kind", "device", "size_bytes", "handle")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    device: int
    size_bytes: int
    handle: bytes
    def __init__(self, kind: _Optional[str] = ..., device: _Optional[int] = ..., size_bytes: _Optional[int] = ..., handle: _Optional[bytes] = ...) -> None: ...

class PortError(_message.Message):
    __slots__ = ("name", "details")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    name: str
    details: str
    def __init__(self, name: _Optional[str] = ..., details: _Optional[str] = ...) -> None: ...

class BulkReadRequest(_message.Message):
    __slots__ = ("lease_id", "keys", "sections", "locate")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    LOCATE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    keys: bytes
    sections: _containers.RepeatedScalarFieldContainer[int]
    locate: bool
    def __init__(self, lease_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., sections: _Optional[_Iterable[int]] = ..., locate: _Optional[bool] = ...) -> None: ...

class BulkReadReply(_message.Message):
    __slots__ = ("outcomes", "tiers", "section_bytes", "checksums", "slots", "arena_id")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SECTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    tiers: bytes
    section_bytes: _containers.RepeatedScalarFieldContainer[int]
    checksums: bytes
    slots: bytes
    arena_id: bytes
    def __init__(self, outcomes: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., section_bytes: _Optional[_Iterable[int]] = ..., checksums: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., arena_id: _Optional[bytes] = ...) -> None: ...

class BulkPutRequest(_message.Message):
    __slots__ = ("namespace_id", "durability", "keys", "parents", "section_bytes", "checksums", "staging_offset")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    SECTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSET_FIELD_NUMBER: _ClassVar[int]
    namespace_id: bytes
    durability: Durability
    keys: bytes
    parents: bytes
    section_bytes: _containers.RepeatedScalarFieldContainer[int]
    checksums: bytes
    staging_offset: int
    def __init__(self, namespace_id: _Optional[bytes] = ..., durability: _Optional[_Union[Durability, str]] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., section_bytes: _Optional[_Iterable[int]] = ..., checksums: _Optional[bytes] = ..., staging_offset: _Optional[int] = ...) -> None: ...
