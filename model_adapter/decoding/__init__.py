"""From logits to tokens: sampling, speculative decoding, batches.

`generate` decodes one sequence, with or without drafts; `Batch` decodes several together. All of
them give a sequence the same tokens, and leave the same cache behind.
"""

from model_adapter.decoding.batch import Batch, decode_batch
from model_adapter.decoding.generate import generate
from model_adapter.decoding.sampling import Sampler, SamplingParams, never_generated
from model_adapter.decoding.speculative import Drafts, SpeculationStats

__all__ = [
    "Batch",
    "Drafts",
    "Sampler",
    "SamplingParams",
    "SpeculationStats",
    "decode_batch",
    "generate",
    "never_generated",
]
