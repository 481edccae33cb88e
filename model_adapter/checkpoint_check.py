"""Is a checkpoint complete, and does it fit its config? Headers only; no weight is read."""

from collections.abc import Iterator

from model_adapter import quantized
from model_adapter.checkpoint import Checkpoint
from model_adapter.checkpoint_spec import Encoding, TensorSpec, tensor_specs
from model_adapter.config import ModelConfig
from model_adapter.errors import TensorError

_OPTIONAL = {"vision.": "vision", "aligner.": "vision", "image_": "vision", "mtp.": "draft"}
"""Name prefixes of the parts that a text-only checkpoint may leave out, each as a whole."""


def check_checkpoint(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise `TensorError` for the first tensor that is missing, misshapen or lacks its other half.

    Tensors that the config does not ask for are ignored, but for a scale without its weight.
    """
    present = {_part(name) for name in checkpoint.names()}
    for spec in tensor_specs(config.raw):
        if _part(spec.name) in present | {"text"}:
            _check_tensor(checkpoint, spec)
    for name in checkpoint.names():
        if name.endswith(".scale") and f"{name.removesuffix('.scale')}.weight" not in checkpoint:
            raise TensorError(f"{name} in {checkpoint.where(name)} is a scale without a weight")


def has_part(checkpoint: Checkpoint, part: str) -> bool:
    """Whether the checkpoint holds the optional part `vision` or `draft`."""
    return any(_part(name) == part for name in checkpoint.names())


def _part(name: str) -> str:
    return next((part for prefix, part in _OPTIONAL.items() if name.startswith(prefix)), "text")


def _check_tensor(checkpoint: Checkpoint, spec: TensorSpec) -> None:
    if spec.name not in checkpoint:
        raise TensorError(
            f"{checkpoint.directory} lacks {spec.name}, which its config.json asks for"
        )
    shape, dtype = checkpoint.header(spec.name)
    where = checkpoint.where(spec.name)
    quantised = dict(_quantised_forms(spec))
    if dtype not in quantised.keys() | quantized.PLAIN_DTYPES:
        raise TensorError(
            f"{spec.name} in {where} has dtype {dtype}; expected one of "
            f"{sorted(quantised.keys() | quantized.PLAIN_DTYPES)}"
        )
    code_shape, scale_shape = quantised.get(dtype, (spec.shape, None))
    _expect_shape(spec.name, where, shape, code_shape)
    if scale_shape is not None:
        _check_scale(checkpoint, spec, dtype, scale_shape)
    elif spec.scale_name != spec.name and spec.scale_name in checkpoint:
        raise TensorError(f"{spec.name} in {where} is {dtype} and yet has {spec.scale_name}")


def _check_scale(
    checkpoint: Checkpoint, spec: TensorSpec, dtype: str, scale_shape: tuple[int, ...]
) -> None:
    name = spec.scale_name
    if name not in checkpoint:
        where = checkpoint.where(spec.name)
        raise TensorError(f"{spec.name} in {where} is {dtype} but has no {name}")
    shape, scale_dtype = checkpoint.header(name)
    if scale_dtype != quantized.SCALE_DTYPE:
        raise TensorError(
            f"{name} in {checkpoint.where(name)} has dtype {scale_dtype}; expected "
            f"{quantized.SCALE_DTYPE}"
        )
    _expect_shape(name, checkpoint.where(name), shape, scale_shape)


def _expect_shape(name: str, where: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise TensorError(
            f"{name} in {where} has shape {list(shape)}; config.json asks for {list(expected)}"
        )


def _quantised_forms(
    spec: TensorSpec,
) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """On-disk dtype → shapes of codes and scale."""
    if spec.scale_shape is None:
        return
    fp4 = spec.encoding is Encoding.FP4_ROW
    for dtype in sorted(quantized.FP4_DTYPES) if fp4 else [quantized.FP8_DTYPE]:
        yield dtype, (spec.code_shape, spec.scale_shape)
