"""Packed cache records from and to tensors, on their device: the adapter's side of `kernels` (ds41f
§4).

The CPU's codecs and the CUDA kernels give the same bytes, bit for bit.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

import kernels
from kernels import gpu
from kernels.layout import KINDS
from model_adapter.devices import kernel_stream

Records = torch.Tensor
"""uint8 [..., record bytes], on whichever device."""
HostRecords = npt.NDArray[np.uint8]
Kind = Literal["nvfp4", "mxfp4", "fp8"]

MAIN: Kind = "nvfp4"
INDEX: Kind = "mxfp4"
WINDOW: Kind = "fp8"

_QUANTIZE = {
    MAIN: kernels.nvfp4_quantize,
    INDEX: kernels.mxfp4_quantize,
    WINDOW: kernels.fp8_quantize,
}
_DEQUANTIZE = {
    MAIN: kernels.nvfp4_dequantize,
    INDEX: kernels.mxfp4_dequantize,
    WINDOW: kernels.fp8_dequantize,
}
_SCALES_PER_STEP = 4
"""The CUDA kernels take rows whose scales are whole words."""
_ALIGNMENT = 16


def pack(kind: Kind, values: torch.Tensor) -> Records:
    """float32 or bfloat16 [..., D] to records uint8 [..., record bytes]."""
    values = values.contiguous()
    if values.device.type == "cuda":
        return _pack_on_device(kind, values)
    if values.dtype == torch.bfloat16:
        array = values.view(torch.int16).numpy().view(np.uint16)
    else:
        array = values.numpy()
    return torch.from_numpy(_QUANTIZE[kind](array))


def unpack(kind: Kind, records: Records) -> torch.Tensor:
    """Records uint8 [..., record bytes] to float32 [..., D]; exact, whatever the model's dtype."""
    records = records.contiguous()
    if records.device.type == "cuda":
        return _unpack_on_device(kind, records)
    return torch.from_numpy(_DEQUANTIZE[kind](records.numpy()))


def host(records: Records) -> HostRecords:
    """Records as an array: a view of those that are on the host, else a copy."""
    array: HostRecords = records.cpu().numpy()
    return array


def fill(rows: Records, data: Records | HostRecords) -> None:
    """Copy records into `rows`, from wherever they are. Between devices the copy is queued; an
    array of the host may be changed again when this returns."""
    if isinstance(data, torch.Tensor):
        rows.copy_(data)
    elif rows.device.type == "cpu":
        np.copyto(rows.numpy(), data)
    else:
        # torch takes no array that can't be written
        rows.copy_(torch.from_numpy(data if data.flags.writeable else data.copy()))


def _pack_on_device(kind: Kind, values: torch.Tensor) -> Records:
    form, channels = KINDS[kind], values.shape[-1]
    missing = -channels % (form.group * _SCALES_PER_STEP)
    wide = functional.pad(values, (0, missing)) if missing else _aligned(values)
    out = wide.new_empty((*wide.shape[:-1], form.record_bytes(wide.shape[-1])), dtype=torch.uint8)
    bits = wide.view(torch.uint16) if wide.dtype == torch.bfloat16 else wide
    with kernel_stream(values.device):
        gpu.quantize(kind, bits, out)
    if not missing:
        return out
    # a group knows nothing of its neighbours, so that groups added are groups to leave out
    scales, count = form.code_bytes(wide.shape[-1]), channels // form.group
    codes = out[..., : form.code_bytes(channels)]
    return torch.cat([codes, out[..., scales : scales + count]], dim=-1)


def _unpack_on_device(kind: Kind, records: Records) -> torch.Tensor:
    form = KINDS[kind]
    channels = form.channels(records.shape[-1])
    missing = -channels % (form.group * _SCALES_PER_STEP)
    if missing:
        codes, scales = records.split([form.code_bytes(channels), channels // form.group], dim=-1)
        records = torch.cat(
            [
                functional.pad(codes, (0, form.code_bytes(missing))),
                functional.pad(scales, (0, missing // form.group)),
            ],
            dim=-1,
        )
    records = _aligned(records)
    out = records.new_empty((*records.shape[:-1], channels + missing), dtype=torch.float32)
    with kernel_stream(records.device):
        gpu.dequantize(kind, records, "float32", out)
    return out[..., :channels].contiguous()


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Where the kernels can read it 16 bytes at a time; rows of a slice may begin elsewhere."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
