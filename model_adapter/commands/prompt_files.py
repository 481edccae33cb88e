"""The prompt that a command is given: a file of text, and pictures at its placeholders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from model_adapter.chat.tokens import BOS, IMAGE
from model_adapter.config import ModelConfig
from model_adapter.errors import ImageError, InputError
from model_adapter.tokenizer import encode_prompt, load_tokenizer
from model_adapter.vision import ImagePatches, ImagePrompt, encode_with_images, read_image


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """`text`: UTF-8. `images`: one per placeholder in the text, in their order."""

    text: Path
    images: Sequence[Path] = ()

    def read(self, checkpoint: Path) -> ImagePrompt:
        """Tokens and images as the checkpoint's model takes them, bos in front.

        Raises `InputError` for a text that can't be read or is empty, `ImageError` for a picture
        that can't be read, for a model that takes none, and where placeholders and pictures differ
        in number.
        """
        text = _read_text(self.text)
        tokenizer = load_tokenizer(checkpoint)
        if self.images:
            return self._placed(checkpoint, tokenizer, text)
        return ImagePrompt(np.asarray(encode_prompt(tokenizer, text), np.int64), ())

    def _placed(self, checkpoint: Path, tokenizer: Tokenizer, text: str) -> ImagePrompt:
        config = ModelConfig.load(checkpoint)
        if config.vision is None or config.image_token is None:
            raise ImageError(f"the model of {checkpoint} has no vision part; give text only")
        images = [_read_image(path, config) for path in self.images]

        def encode(part: str) -> list[int]:
            ids: list[int] = tokenizer.encode(part, add_special_tokens=False).ids
            return ids

        whole = text if text.startswith(BOS) else BOS + text
        try:
            return encode_with_images(whole, images, encode, config.image_token)
        except ImageError as e:
            raise ImageError(f"{self.text}: {e}; write {IMAGE} where each --image belongs") from e


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"can't read the prompt {path}: {e}") from e
    if not text:
        raise InputError(f"the prompt {path} is empty")
    return text


def _read_image(path: Path, config: ModelConfig) -> ImagePatches:
    assert config.vision is not None
    try:
        return read_image(path, config.vision)
    except ImageError as e:
        raise ImageError(f"--image {path}: {e}") from e
