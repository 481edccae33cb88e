"""The merged vocabulary of Engram (ds41f §2 Hashing): ids whose text is the same but for case,
accents, compatibility forms and white space share one."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, normalizers

from model_adapter.errors import CheckpointError

_REPLACEMENT = "\ufffd"
_NORMALIZER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    ]
)


def merge_key(tokenizer: Tokenizer, token_id: int) -> str:
    """What decides whether two ids are merged."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if _REPLACEMENT in text:
        return tokenizer.id_to_token(token_id) or ""
    normal = _NORMALIZER.normalize_str(text)
    if normal != " ":
        normal = normal.strip()
    return normal or text


def token_map(tokenizer: Tokenizer, vocab: int) -> npt.NDArray[np.int64]:
    """Merged id of every vocabulary id, int64 [vocab], numbered in order of first use."""
    merged: dict[str, int] = {}
    return np.fromiter(
        (merged.setdefault(merge_key(tokenizer, i), len(merged)) for i in range(vocab)),
        np.int64,
        vocab,
    )


def load_token_map(directory: Path, vocab: int, compressed_vocab: int) -> npt.NDArray[np.int64]:
    """`token_map` of a checkpoint's `tokenizer.json`.

    Raises `CheckpointError` where the file is missing or broken, or where it does not merge to
    the size that the config states: every hash would be another one.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; Engram needs it to merge the vocabulary")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises a bare Exception
        raise CheckpointError(f"{path} is no tokenizer: {e}") from e
    merged = token_map(tokenizer, vocab)
    size = int(merged.max()) + 1
    if size != compressed_vocab:
        raise CheckpointError(
            f"{path} merges {vocab} ids to {size}, config.json says engram_compressed_vocab_size "
            f"{compressed_vocab}: the tokenizer belongs to another checkpoint"
        )
    return merged
