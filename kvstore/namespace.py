"""What decides whether bytes may be reused: model, weight revision, record layout, tenant.

A namespace's identity is the digest of its canonical JSON (`Namespace.canonical_json`), byte for
byte the same from any language: sorted keys, no spaces, UTF-8 without escapes. `docs/identity.md`
has the format and worked examples.
"""

import hashlib
import hmac
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from kvstore.errors import InvalidRequest

Role = Literal["main", "index"]
DIGEST_BYTES = 32
NAMESPACE_FORMAT = 1
BLOCK_TOKENS_DEFAULT = 256
SECTIONS_MAX = 64
BLOCK_BYTES_MAX = 64 << 20
_NAMESPACE_CONTEXT = b"ds41-kvstore/v1/namespace\0"
_TENANT_CONTEXT = b"ds41-kvstore/v1/tenant\0"
_NAME_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True, order=True)
class SectionSpec:
    """One global cache's rows in a block.

    `layer`: the layer that owns the cache. `role`: `main` (entries) or `index` (index keys).
    `ratio`: tokens per row. `row_bytes`: bytes of one record (ds41f §4: 288 and 68 as released).
    """

    layer: int
    role: Role
    ratio: int
    row_bytes: int

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise InvalidRequest(f"section role {self.role!r} is neither 'main' nor 'index'")
        for name in ("layer", "ratio", "row_bytes"):
            value = getattr(self, name)
            least = 0 if name == "layer" else 1
            if type(value) is not int or value < least:
                raise InvalidRequest(f"section {name} must be an int ≥ {least}, not {value!r}")


@dataclass(frozen=True)
class Layout:
    """The ordered sections of a block and how many tokens a block holds.

    Raises `InvalidRequest` where a section's ratio does not divide `block_tokens`, where two
    sections name the same cache, or where a block would pass `BLOCK_BYTES_MAX`.
    """

    sections: tuple[SectionSpec, ...]
    block_tokens: int = BLOCK_TOKENS_DEFAULT

    def __post_init__(self) -> None:
        if not 1 <= len(self.sections) <= SECTIONS_MAX:
            raise InvalidRequest(
                f"a layout has 1 to {SECTIONS_MAX} sections, not {len(self.sections)}"
            )
        if type(self.block_tokens) is not int or self.block_tokens < 1:
            raise InvalidRequest(f"block_tokens must be an int ≥ 1, not {self.block_tokens!r}")
        for spec in self.sections:
            if self.block_tokens % spec.ratio:
                raise InvalidRequest(
                    f"block_tokens {self.block_tokens} is not a multiple of the ratio "
                    f"{spec.ratio} of layer {spec.layer}"
                )
        if len({(s.layer, s.role) for s in self.sections}) != len(self.sections):
            raise InvalidRequest("a layout names the same layer and role twice")
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise InvalidRequest(f"a block of {self.block_bytes} B passes {BLOCK_BYTES_MAX} B")

    @cached_property
    def section_bytes(self) -> tuple[int, ...]:
        """Bytes of each section of a full block."""
        return tuple(self.block_tokens // s.ratio * s.row_bytes for s in self.sections)

    @cached_property
    def section_offsets(self) -> tuple[int, ...]:
        """Where each section starts in a block's payload; sections lie one behind the other."""
        offsets, at = [], 0
        for size in self.section_bytes:
            offsets.append(at)
            at += size
        return tuple(offsets)

    @cached_property
    def block_bytes(self) -> int:
        """Payload bytes of one block (227,840 at the released layout and 256 tokens)."""
        return sum(self.section_bytes)

    @property
    def bytes_per_token(self) -> float:
        """Global KV per token (890.0 at the released layout)."""
        return self.block_bytes / self.block_tokens


_ROLES: tuple[tuple[Role, int], ...] = (("main", 288), ("index", 68))
DS41F_LAYOUT = Layout(
    tuple(
        SectionSpec(layer, role, ratio, row_bytes)
        for layer, ratio in ((2, 2), (8, 2), (14, 2), (20, 1))
        for role, row_bytes in _ROLES
    )
)
"""The released DS4.1F layout: ds41f §4."""


def _is_name(value: str) -> bool:
    try:
        return len(value.encode()) <= _NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class Namespace:
    """The descriptor. `tenant` is empty where nothing has to be kept apart."""

    model: str
    weight_revision: str
    layout: Layout
    tenant: str = ""

    def __post_init__(self) -> None:
        for name in ("model", "weight_revision", "tenant"):
            value = getattr(self, name)
            if not isinstance(value, str) or not _is_name(value):
                raise InvalidRequest(
                    f"{name} must be a Unicode string of at most {_NAME_BYTES_MAX} B"
                )
        if not self.model or not self.weight_revision:
            raise InvalidRequest("a namespace needs a model and a weight_revision")

    def canonical_json(self) -> bytes:
        """The bytes whose digest is the identity."""
        return json.dumps(
            {
                "block_tokens": self.layout.block_tokens,
                "format": NAMESPACE_FORMAT,
                "layout": [
                    {
                        "layer": s.layer,
                        "ratio": s.ratio,
                        "role": s.role,
                        "row_bytes": s.row_bytes,
                    }
                    for s in self.layout.sections
                ],
                "model": self.model,
                "tenant": self.tenant,
                "weight_revision": self.weight_revision,
            },
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> "Namespace":
        """The inverse of `canonical_json`; unknown keys and formats are refused."""
        try:
            d: dict[str, Any] = json.loads(text)
            if d.pop("format") != NAMESPACE_FORMAT:
                raise InvalidRequest(f"namespace format is not {NAMESPACE_FORMAT}: {text!r}")
            sections = tuple(SectionSpec(**s) for s in d.pop("layout"))
            layout = Layout(sections, d.pop("block_tokens"))
            return cls(layout=layout, **d)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise InvalidRequest(f"not a namespace descriptor ({e}): {text!r}") from e


def namespace_id(namespace: Namespace, secret: bytes | None = None) -> bytes:
    """The 32-byte identity, parent of every chain's first block.

    A tenant's namespace mixes in `secret` (HMAC-SHA-256), which only the daemon knows, so that
    two tenants share nothing and neither can compute the other's keys.

    Raises `InvalidRequest` where a tenant is named and no secret is given.
    """
    digest = hashlib.sha256(_NAMESPACE_CONTEXT + namespace.canonical_json()).digest()
    if not namespace.tenant:
        return digest
    if not secret:
        raise InvalidRequest(f"tenant {namespace.tenant!r} needs the store's tenant secret")
    return hmac.new(secret, _TENANT_CONTEXT + digest, hashlib.sha256).digest()
