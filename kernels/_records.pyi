"""The compiled record codecs (kernels/csrc). Callers go through `kernels.codec`."""

from typing import Any

import numpy.typing as npt

def quantize(
    kind: str,
    backend: str,
    values: npt.NDArray[Any],
    records: npt.NDArray[Any],
    channels: int,
    /,
) -> None: ...
def dequantize(
    kind: str,
    backend: str,
    records: npt.NDArray[Any],
    values: npt.NDArray[Any],
    channels: int,
    /,
) -> None: ...
def backends() -> tuple[str, ...]: ...
