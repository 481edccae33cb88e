"""The three record kinds and their sizes (ds41f §4).

A record is one row's codes followed by its scales, one byte each::

    kind   codes                                scale, per channels   512 channels   128 channels
    nvfp4  e2m1, two per byte, 2i = low nibble  e4m3, 16              288 bytes      72 bytes
    mxfp4  e2m1, two per byte, 2i = low nibble  ue8m0, 32             272 bytes      68 bytes
    fp8    e4m3                                 ue8m0, 32             528 bytes      132 bytes
"""

from dataclasses import dataclass
from typing import Final, Literal

KindName = Literal["nvfp4", "mxfp4", "fp8"]


@dataclass(frozen=True, slots=True)
class RecordKind:
    """How one kind of record lays out a row of channels."""

    name: KindName
    group: int
    """Channels that share one scale."""
    code_bits: int

    def code_bytes(self, channels: int) -> int:
        """Bytes of a row's codes; its scales begin there."""
        return channels * self.code_bits // 8

    def record_bytes(self, channels: int) -> int:
        """Bytes of a row. ValueError unless channels is a positive multiple of the group."""
        if channels <= 0 or channels % self.group != 0:
            raise ValueError(
                f"{channels} channels: {self.name} records need a positive multiple of {self.group}"
            )
        return self.code_bytes(channels) + channels // self.group

    def channels(self, record_bytes: int) -> int:
        """The inverse of `record_bytes`. ValueError if no row has that size."""
        group_bytes = self.code_bytes(self.group) + 1
        if record_bytes <= 0 or record_bytes % group_bytes != 0:
            raise ValueError(
                f"{record_bytes} bytes: {self.name} records need a positive multiple of "
                f"{group_bytes} (a group of {self.group} channels and its scale)"
            )
        return record_bytes // group_bytes * self.group


NVFP4: Final = RecordKind("nvfp4", group=16, code_bits=4)
MXFP4: Final = RecordKind("mxfp4", group=32, code_bits=4)
FP8: Final = RecordKind("fp8", group=32, code_bits=8)
KINDS: Final = {kind.name: kind for kind in (NVFP4, MXFP4, FP8)}


def record_kind(name: str) -> RecordKind:
    """The kind of that name; ValueError if there is none."""
    for kind in KINDS.values():
        if kind.name == name:
            return kind
    raise ValueError(f"record kind {name!r} is unknown; use one of {', '.join(KINDS)}")


def record_bytes(kind: str, dim: int) -> int:
    """Bytes of one record of `dim` channels: ``record_bytes("nvfp4", 512) == 288``.

    ValueError for an unknown kind, or a dim that is no positive multiple of the kind's group.
    """
    return record_kind(kind).record_bytes(dim)
