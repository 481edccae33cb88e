"""One request after another over one model and one source of blocks."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore import Client, ImageSpan, Namespace, Outlook
from model_adapter.dspark import SequenceDrafts
from model_adapter.errors import InputError
from model_adapter.generate import greedy
from model_adapter.model import Model
from model_adapter.replay import Mode
from model_adapter.run import CHUNK_TOKENS_DEFAULT
from model_adapter.session.fetch_choice import FetchChoice
from model_adapter.session.request import Decode, Generation, OnToken, Request, Stopped, Way
from model_adapter.session.source import BlockSource, TokenIds
from model_adapter.session.store_blocks import StoreBlocks
from model_adapter.vision import ImagePatches, PlacedImage, VisionEncoder, locate_images


class CachedSession:
    """Generates, taking from `source` what it holds and leaving there what is new.

    Every request has a cache of its own: what two requests share, they share through the source.
    `source`: none for a model without a store. `mode`: `bounded` or `exact` (ds41f §5).
    `chunk_tokens`: positions per prefill chunk; blocks are stored as chunks finish. `snapshots`:
    leave window snapshots at the end of every prompt and answer, and go on from the longest one
    that lies on a prompt; without them every hit is a replay.

    A session serves one request at a time.
    """

    def __init__(
        self,
        model: Model,
        source: BlockSource | None = None,
        mode: Mode = "bounded",
        chunk_tokens: int = CHUNK_TOKENS_DEFAULT,
        snapshots: bool = True,
    ) -> None:
        self.model = model
        self.source = source
        self.mode = mode
        self.chunk_tokens = chunk_tokens
        self.snapshots = snapshots
        self.choice = FetchChoice()

    @cached_property
    def vision(self) -> VisionEncoder:
        """Made for the first image. Raises `ImageError` where the model has no vision part."""
        return VisionEncoder.of(self.model.config, self.model.weights)

    def generate(
        self,
        prompt_ids: Collection[int] | npt.NDArray[np.integer],
        max_tokens: int,
        stop_ids: Collection[int] = (),
        on_token: OnToken | None = None,
        *,
        images: Sequence[ImagePatches] = (),
        decode: Decode = greedy,
        drafts: SequenceDrafts | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Generation:
        """Answer one prompt with at most `max_tokens` tokens, or up to one of `stop_ids`.

        `images`: those whose spans are in the prompt, in order. `drafts`: those that `decode` uses,
        fresh; they see the prefill and go into snapshots. `stopped`: asked after every prefill
        chunk and every token; the answer ends where it says yes.

        Raises `InputError` for an empty prompt, for `max_tokens` below one, and where prompt and
        answer together pass the model's positions; `ImageError` where the prompt's image tokens are
        not the spans of `images`.
        """
        request = self.request(
            prompt_ids, max_tokens, images=images, drafts=drafts, stopped=stopped
        )
        try:
            logits = request.prefill()
        except Stopped:
            return Generation([], request.report())
        return request.answer(logits, max_tokens, stop_ids, on_token, decode)

    def answered(
        self,
        token_ids: Collection[int] | npt.NDArray[np.integer],
        outlook: Outlook,
        lasting_tokens: int | None = None,
        images: Sequence[ImagePatches] = (),
    ) -> None:
        """Tell the source what is known of the next request; see `BlockSource.answered`.

        `token_ids`: a prompt and its answer. `images`: those of the prompt.
        """
        if self.source is None:
            return
        ids = np.asarray(token_ids, dtype=np.uint32)
        spans = [placed.span for placed in self._placed(ids, images)]
        self.source.answered(ids, outlook, lasting_tokens, spans)

    def request(
        self,
        prompt_ids: Collection[int] | npt.NDArray[np.integer],
        max_tokens: int,
        *,
        images: Sequence[ImagePatches] = (),
        spans: Sequence[ImageSpan] = (),
        drafts: SequenceDrafts | None = None,
        stopped: Callable[[], bool] | None = None,
    ) -> Request:
        """A checked request whose steps the caller takes; arguments and errors as of `generate`.

        `spans`: where images stand, for a request that goes on behind a prompt which another
        process has run (`Request.go_on`): it needs their names and not their pixels.
        """
        ids = np.asarray(prompt_ids, dtype=np.uint32)
        if ids.size == 0 or max_tokens < 1:
            raise InputError(
                f"a prompt of {ids.size} tokens, max_tokens {max_tokens}: both must be at least 1"
            )
        positions = len(ids) + max_tokens - 1
        if positions > self.model.config.positions_max:
            raise InputError(
                f"a prompt of {len(ids)} tokens and {max_tokens} to generate pass the model's "
                f"{self.model.config.positions_max} positions"
            )
        placed = () if spans else self._placed(ids, images)
        return Request(self._way, ids, placed, spans, drafts, stopped)

    @property
    def _way(self) -> Way:
        return Way(
            *(self.model, self.source, self.mode, self.chunk_tokens, self.snapshots),
            lambda: self.vision,
            self.choice,
        )

    def _placed(self, ids: TokenIds, images: Sequence[ImagePatches]) -> tuple[PlacedImage, ...]:
        """Where the images stand. An image token without its image would name blocks by nothing
        but its place."""
        if images:
            _ = self.vision
        image_token = self.model.config.image_token
        return (
            ()
            if image_token is None
            else locate_images(ids.astype(np.int64), images, image_token).images
        )


def generate_with_store(
    model: Model,
    client: Client,
    namespace: Namespace,
    prompt_ids: Collection[int] | npt.NDArray[np.integer],
    max_tokens: int,
    mode: Mode = "bounded",
    stop_ids: Collection[int] = (),
) -> Generation:
    """One request over the store at `client`; see `CachedSession.generate`."""
    session = CachedSession(model, StoreBlocks(client, namespace), mode)
    return session.generate(prompt_ids, max_tokens, stop_ids)
