"""Where the adapter computes: the CPU, or a CUDA device.

Whatever a pass makes, it makes on its model's device; weights and token ids come from the host, and
sampled tokens go there. Work on a device is queued on torch's current stream, that of the record
kernels too, so that nothing has to be waited for in between.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kernels import gpu
from model_adapter.errors import InputError

CPU = torch.device("cpu")


def device_of(name: str) -> torch.device:
    """The device of that name: `cpu`, `cuda` or `cuda:1`.

    Raises `InputError` where the name is another, or where torch or CuPy can't use the device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is unknown; use cpu, cuda or cuda:N")
    if device.type == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise InputError(
            f"device {name!r}: torch sees no CUDA device here (torch {torch.__version__}); install "
            "a CUDA build of torch, look at CUDA_VISIBLE_DEVICES, or use cpu"
        )
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        raise InputError(f"device {name!r}: torch sees {count} CUDA devices, from cuda:0 on")
    try:
        gpu.check()
    except gpu.GpuUnavailableError as e:
        raise InputError(f"device {name!r}: the record kernels can't run: {e}") from e
    return torch.device("cuda", index)


def kernel_stream(device: torch.device) -> AbstractContextManager[object]:
    """`kernels.gpu` queues on torch's current stream of a CUDA device inside."""
    stream = torch.cuda.current_stream(device)
    return gpu.on_stream(device.index or 0, int(stream.cuda_stream))


def finish(device: torch.device) -> None:
    """Wait until what was queued on torch's current stream is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """For another thread's copies: its current stream inside, behind what this thread has queued so
    far and beside what it queues from now on."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def staging(shape: Sequence[int]) -> torch.Tensor:
    """uint8 memory of the host for copies to a GPU, pinned where there is one."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
