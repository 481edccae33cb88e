"""One layer: Engram at its entry, then the attention site and the FFN site (ds41f §2)."""

import torch

from model_adapter.attention import Attention
from model_adapter.config import LayerSpec, ModelConfig
from model_adapter.engram import Engram
from model_adapter.forward_pass import ForwardPass
from model_adapter.hyper_connections import StreamSite, collapse, spread
from model_adapter.moe import MoE
from model_adapter.norms import rms_norm
from model_adapter.weights import Weights


class Block:
    """A backbone layer, or one of DSpark's with `engram` None and an `attention` of its own."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        weights: Weights,
        engram: Engram | None,
        attention: Attention | None = None,
    ) -> None:
        self.spec = spec
        self._prefix = spec.prefix
        self._eps = config.norm_eps
        self._weights = weights
        self.engram = engram
        self._attention = attention or Attention(config, spec, weights)
        self._moe = MoE(config, spec, weights)
        self._attention_site, self._ffn_site = (
            StreamSite(
                weights,
                f"{spec.prefix}.{site}",
                config.streams,
                config.sinkhorn_iterations,
                config.stream_eps,
                config.norm_eps,
            )
            for site in ("hc_attn", "hc_ffn")
        )

    def forward(
        self, streams: torch.Tensor, pre_mix: torch.Tensor, work: ForwardPass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """streams [T, n, H] and pre_mix float32 [T, n] at the pass's positions; returns both as
        the next block takes them."""
        work.observe("streams_in", self.spec.index, streams)
        work.observe("pre_mix_in", self.spec.index, pre_mix)
        streams = self._look_up(streams, work)
        work.observe("attention_streams", self.spec.index, streams)
        c = self._attention_site.coefficients(streams)
        x = self._normed(collapse(streams, pre_mix), "attn_norm")
        streams = spread(streams, self._attention.forward(x, work), c)
        pre_mix = c.pre
        c = self._ffn_site.coefficients(streams)
        x = self._normed(collapse(streams, pre_mix), "ffn_norm")
        streams = spread(streams, self._moe.forward(x, work.image_mask), c)
        return streams, c.pre

    def write_global(self, streams: torch.Tensor, pre_mix: torch.Tensor, work: ForwardPass) -> None:
        """Only append the layer's global rows (ds41f §2 CED): all that a prompt position which the
        decoder skips has to leave behind."""
        assert self._attention.compressor is not None
        x = collapse(self._look_up(streams, work), pre_mix)
        self._attention.compressor.append(self._normed(x, "attn_norm"), work)

    def _look_up(self, streams: torch.Tensor, work: ForwardPass) -> torch.Tensor:
        return streams if self.engram is None else self.engram.forward(streams, work)

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self._weights.vector(f"{self._prefix}.{name}.weight"), self._eps)
