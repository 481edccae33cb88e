"""A byte-level BPE tokenizer with the released special tokens (ds41f §6), for random checkpoints.

Every string can be encoded and comes back unchanged: the 256 bytes are tokens, merges are learned
from text so that prompts compress as real ones do.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from model_adapter.chat.tokens import (
    ASSISTANT,
    BOS,
    EOS,
    IMAGE,
    SYSTEM,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_RESULT_CLOSE,
    TOOL_RESULT_OPEN,
    USER,
)
from model_adapter.errors import CheckpointError

PAD = "<｜▁pad▁｜>"
DSML = "｜DSML｜"
NOISE = "<｜noise｜>"

FIRST_TOKENS = (
    BOS,
    EOS,
    PAD,
    SYSTEM,
    USER,
    ASSISTANT,
    THINK_OPEN,
    THINK_CLOSE,
    DSML,
    TOOL_RESULT_OPEN,
    TOOL_RESULT_CLOSE,
)
"""Ids 0, 1, 2, …: bos, eos and pad where the released vocabulary has them."""
LAST_TOKENS = (NOISE, IMAGE)
"""The vocabulary's last ids: DSpark's noise token and the one id of all image tokens."""
VOCAB_MIN = len(FIRST_TOKENS) + 256 + len(LAST_TOKENS)
_FILE = "tokenizer.json"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` entries, the same for the same texts.

    Where the texts run out of pairs to merge, unused tokens fill up the vocabulary.

    Raises `ValueError` where `vocab_size` can't hold the bytes and the special tokens.
    """
    if vocab_size < VOCAB_MIN:
        raise ValueError(f"a byte-level vocabulary needs {VOCAB_MIN} entries, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    learned = vocab_size - len(LAST_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=learned,
        special_tokens=list(FIRST_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    unused = [f"<｜unused{i}｜>" for i in range(tokenizer.get_vocab_size(), learned)]
    tokenizer.add_special_tokens([*unused, *LAST_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(directory / _FILE))
    settings = {
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": 1 << 20,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises `CheckpointError` where `tokenizer.json` is missing or broken.
    """
    path = directory / _FILE
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: a checkpoint needs its tokenizer to take text")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises a bare Exception
        raise CheckpointError(f"{path} is no tokenizer: {e}") from e


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt, with bos in front where the text does not start with it."""
    return tokenizer.encode(text if text.startswith(BOS) else BOS + text).ids


def decode_answer(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The text of generated tokens, special tokens shown."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=False)
