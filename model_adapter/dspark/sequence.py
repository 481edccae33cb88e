"""One sequence's drafts: features of what the backbone ran go in, tokens to verify come out."""

from collections.abc import Collection

import torch

from model_adapter.dspark.drafter import Drafter
from model_adapter.dspark.features import FeatureTap
from model_adapter.dspark.windows import DraftWindows
from model_adapter.errors import InputError
from model_adapter.few_rows import FEW_ROWS_MAX

VERIFY_THRESHOLD_DEFAULT = 0.3


def verify_count(confidences: torch.Tensor, threshold: float) -> int:
    """How many guesses to verify: the longest prefix that stands with a chance of at least
    `threshold`.

    A confidence is the chance of one guess given those before it, so the chance of a prefix is the
    product over it. `threshold` is what one more position costs a verifying pass, as a share of a
    decode step: 0 verifies every guess, above 1 none.
    """
    return int((confidences.cumprod(0) >= threshold).sum())


class SequenceDrafts:
    """Drafts for one sequence cache.

    Pass `observer` to every `Model.prefill`, `resume` and `decode` of the sequence: positions that
    ran without it are missing from the draft layers' windows, which makes the guesses worse and
    nothing wrong. `verify_threshold`: see `verify_count`. `windows`: what a hand-over of the
    sequence takes along.
    """

    def __init__(
        self, drafter: Drafter, verify_threshold: float = VERIFY_THRESHOLD_DEFAULT
    ) -> None:
        if not verify_threshold >= 0:
            raise InputError(f"verify_threshold {verify_threshold} must be at least 0")
        config = drafter.model.config
        self.drafter = drafter
        self.verify_threshold = verify_threshold
        self.windows = DraftWindows(config, drafter.model.device)
        self.observer = FeatureTap(drafter.config, config.window + FEW_ROWS_MAX)

    @torch.inference_mode()
    def take_up(self, end: int, rejected: int = 0) -> None:
        """Positions up to `end` are final; the observer has seen them, and `rejected` more behind
        them that are forgotten."""
        features = self.observer.take()
        if features is not None:
            features = features[: len(features) - rejected]
        first = end if features is None else end - len(features)
        if self.windows.end != first:
            self.windows.restart(first)
        if features is not None:
            self.drafter.extend(self.windows, features)

    def propose(self, token: int, limit: int, banned: Collection[int]) -> tuple[int, ...]:
        """At most `limit` tokens worth verifying behind `token`, which was just sampled for
        position `windows.end`; none of `banned`."""
        if limit < 1:
            return ()
        draft = self.drafter.draft(self.windows, token, banned)
        return draft.tokens[: min(limit, verify_count(draft.confidences, self.verify_threshold))]

    def truncate(self, end: int) -> None:
        """Forget the positions from `end` on."""
        self.windows.truncate(end)
