"""The draft layers: backbone blocks whose attention sees features and the whole draft block."""

import torch

from model_adapter import records
from model_adapter.attention import Attention
from model_adapter.config import LayerSpec, ModelConfig
from model_adapter.dspark.windows import DraftWindows
from model_adapter.forward_pass import ForwardPass, Observer
from model_adapter.weights import Weights


class DraftPass(ForwardPass):
    """One run of the draft layers over the `count` positions from the end of `windows` on."""

    image_mask = None
    """A draft block is text, whatever token its placeholders borrow."""

    def __init__(
        self,
        config: ModelConfig,
        windows: DraftWindows,
        count: int,
        frequencies: torch.Tensor,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(config, (), frequencies, frequencies, observer)
        self.windows = windows
        self.positions = torch.arange(windows.end, windows.end + count, device=frequencies.device)


class DraftAttention(Attention):
    """Attention of draft layer `number`: over the window's records and all of its own block."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, number: int, weights: Weights) -> None:
        super().__init__(config, spec, weights)
        self._number = number

    def _attend_rows(
        self, q: torch.Tensor, fresh: records.Records, work: ForwardPass
    ) -> torch.Tensor:
        assert isinstance(work, DraftPass)
        parts = (work.windows.visible(self._number), fresh)
        keys = torch.cat([records.unpack(records.WINDOW, part) for part in parts])
        return self._attend(q, keys, None, None).to(q.dtype)
