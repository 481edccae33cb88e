"""Under which namespace a checkpoint's blocks are kept."""

import hashlib
import json
from pathlib import Path

from kvstore import Layout, Namespace, SectionSpec
from model_adapter.errors import CheckpointError
from model_adapter.model import Model

BLOCK_TOKENS_DEFAULT = 256
MODEL_DEFAULT = "deepseek_v41"
_CONTEXT = b"ds41f/v1/weights\0"
_SAMPLES_PER_SHARD = 64
_SAMPLE_BYTES = 4096
_INDEX = "model.safetensors.index.json"


def _hash_shard(digest: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header_bytes, size)))
        step = max(_SAMPLE_BYTES, size // _SAMPLES_PER_SHARD)
        for at in range(0, size, step):
            file.seek(at)
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))


def weight_revision(checkpoint: Path) -> str:
    """A 32-character digest that tells one revision of the weights from another.

    It covers `config.json`, the index, every shard's size and header, and pages spread evenly over
    every shard's data: two revisions of one model have the same index, so that their names and
    shapes alone would not tell them apart, and a released checkpoint is too large to be hashed
    whole at every start.

    Raises `CheckpointError` where a file is missing.
    """
    digest = hashlib.sha256(_CONTEXT)
    try:
        for name in ("config.json", _INDEX):
            content = (checkpoint / name).read_bytes()
            digest.update(len(content).to_bytes(8, "little") + content)
        weight_map = json.loads((checkpoint / _INDEX).read_bytes())["weight_map"]
        for shard in sorted(set(weight_map.values())):
            _hash_shard(digest, checkpoint / shard)
    except (OSError, ValueError, KeyError) as e:
        raise CheckpointError(f"{checkpoint} is no complete checkpoint: {e}") from e
    return digest.hexdigest()[:32]


def model_name_of(model: Model) -> str:
    """The config's word for what kind of model it is."""
    return str(model.config.raw.get("model_type", MODEL_DEFAULT))


def namespace_of(
    model: Model,
    checkpoint: Path,
    block_tokens: int = BLOCK_TOKENS_DEFAULT,
    tenant: str = "",
    revision: str | None = None,
) -> Namespace:
    """The namespace of `model`, loaded from `checkpoint`.

    `revision`: a name for the weights that the caller vouches for, instead of `weight_revision`.

    Raises `kvstore.errors.InvalidRequest` where `block_tokens` does not fit the model's ratios.
    """
    sections = tuple(SectionSpec(*section) for section in model.cache_sections())
    return Namespace(
        model=model_name_of(model),
        weight_revision=revision or weight_revision(checkpoint),
        layout=Layout(sections, block_tokens),
        tenant=tenant,
    )
