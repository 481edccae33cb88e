"""The adapter against golden vectors of an independent implementation: `ds41f check-golden`.

A golden directory is a checkpoint with `golden-float32.safetensors` or
`golden-bfloat16.safetensors` in it; `tests/golden/README.md` says what each key is. Every key is
accounted for: compared, an input of a comparison, or listed as not covered.
"""

from model_adapter.golden.check import Report, check_golden
from model_adapter.golden.result import Result, Status

__all__ = ["Report", "Result", "Status", "check_golden"]
