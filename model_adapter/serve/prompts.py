"""From the parameters of a request to the tokens and images that the model reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from model_adapter.chat import ChatOptions, ImageRef, render_chat
from model_adapter.config import ModelConfig
from model_adapter.errors import ImageError
from model_adapter.serve.errors import invalid
from model_adapter.serve.limits import ServeLimits
from model_adapter.serve.parameters import ChatBody, CompletionBody
from model_adapter.tokenizer import encode_prompt
from model_adapter.vision import ImagePatches, encode_with_images, place_images, read_data_url

_SCHEMES = ("http:", "https:", "file:", "ftp:")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`token_ids`: int64 `[S]`, the spans of `images` included. `stable_tokens`: how many of them
    stand in front of whatever a person says next; None where that is not known."""

    token_ids: npt.NDArray[np.int64]
    images: Sequence[ImagePatches] = ()
    stable_tokens: int | None = None


class PromptMaker:
    """Prompts for one model."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, limits: ServeLimits) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._limits = limits

    def completion(self, body: CompletionBody) -> Prompt:
        """Text gets bos in front; token ids are taken as they are.

        Raises `ApiError`, `ImageError` for an image token, which needs its image.
        """
        prompt = body.one_prompt
        if isinstance(prompt, str):
            return self._placed(encode_prompt(self._tokenizer, prompt))
        vocab = self._config.vocab
        if not prompt:
            raise invalid("the prompt is empty", "prompt")
        for token_id in prompt:
            if not 0 <= token_id < vocab:
                raise invalid(f"token id {token_id} is outside the vocabulary of {vocab}", "prompt")
        return self._placed(prompt)

    def chat(self, body: ChatBody) -> Prompt:
        """A conversation as the chat format has it. Raises `ApiError`, `ChatError`, `ImageError`.

        Tools stay in the prompt where `tool_choice` is `none`: without them it would be another
        prefix.
        """
        options = ChatOptions(thinking=body.is_thinking, reasoning_effort=body.effort)
        rendered = render_chat(body.messages, options, body.tools, body.response_format)
        images = self._images(rendered.images)
        if not images:
            stable = len(self._encode(rendered.text[: rendered.stable_chars]))
            return replace(self._placed(self._encode(rendered.text)), stable_tokens=stable)
        placed = encode_with_images(rendered.text, images, self._encode, self._config.image_token)
        return Prompt(placed.token_ids, images)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _placed(self, ids: Sequence[int]) -> Prompt:
        if self._config.image_token is None:
            return Prompt(np.array(ids, dtype=np.int64))
        return Prompt(place_images(ids, (), self._config.image_token).token_ids)

    def _images(self, refs: Sequence[ImageRef]) -> list[ImagePatches]:
        if len(refs) > self._limits.images_max:
            raise invalid(
                f"{len(refs)} images; {self._limits.images_max} at most in one request", "messages"
            )
        return [self._image(ref) for ref in refs]

    def _image(self, ref: ImageRef) -> ImagePatches:
        if self._config.vision is None:
            raise invalid("this model has no vision part; send text only", ref.where)
        url = ref.url
        if url.startswith(_SCHEMES):
            raise invalid(
                f"{ref.where}: images are not fetched; send a data:image/…;base64,… URL", ref.where
            )
        try:
            whole = url if url.startswith("data:") else f"data:;base64,{url}"
            return read_data_url(whole, self._config.vision)
        except ImageError as e:
            raise invalid(f"{ref.where}: {e}", ref.where) from e
