"""Why a safetensors file could not be opened, in words that name the file or the tensor."""

import json
from pathlib import Path
from typing import Any

from model_adapter.errors import CheckpointError, ShardError, TensorError

_LENGTH_BYTES = 8
_KNOWN_DTYPES = frozenset(
    [
        "BOOL",
        "U8",
        "I8",
        "F8_E5M2",
        "F8_E4M3",
        "F8_E8M0",
        "F4",
        "I16",
        "U16",
        "F16",
        "BF16",
        "I32",
        "U32",
        "F32",
        "I64",
        "U64",
        "F64",
        "C64",
    ]
)


def diagnose(path: Path, error: Exception) -> CheckpointError:
    """The error to raise for `path`, which the library refused with `error`."""
    try:
        header, data_start = _read_header(path)
    except (OSError, ValueError) as e:
        return ShardError(
            f"{path} is not a safetensors file, or cut off within its header ({e}); fetch it again"
        )
    for name, entry in header.items():
        dtype = entry.get("dtype") if isinstance(entry, dict) else None
        if dtype not in _KNOWN_DTYPES:
            return TensorError(f"{name} in {path} has the unknown dtype {dtype!r}")
    needed = data_start + max((e["data_offsets"][1] for e in header.values()), default=0)
    size = path.stat().st_size
    if size < needed:
        return ShardError(f"{path} is truncated: {size} of {needed} bytes; fetch it again")
    return ShardError(f"{path} can't be opened ({error}); fetch it again")


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= size - _LENGTH_BYTES:
            raise ValueError(f"header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is no JSON object")
    header.pop("__metadata__", None)
    return header, _LENGTH_BYTES + length
