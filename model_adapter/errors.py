"""Every error that the adapter raises to a caller, in one tree.

::

    AdapterError
    ├── ConfigError           config.json lacks a key, or names what is not implemented
    ├── CheckpointError       the checkpoint can't be used
    │   ├── ShardError        a file is missing, truncated or not safetensors
    │   └── TensorError       a tensor is missing, has a wrong shape or dtype, or lacks its scale
    ├── CacheError            a sequence cache was asked for what it does not hold, or given bytes
    │   │                     that do not fit it
    │   ├── SnapshotError     a snapshot or hand-over is truncated, damaged, of another format or
    │   │                     of another model
    │   └── SectionsLost      sections that were on their way to the cache did not come
    ├── InputError            token ids, hit lengths or modes that can't be right
    │   ├── ChatError         a message, role, tool or option that the chat format has no place for
    │   └── ImageError        a picture that can't be read, or images that don't fit their prompt
    ├── HandoverError         a request is not handed over from prefill to decode
    │   ├── HandoverLost      something did not come, or was not taken, in time: retry
    │   └── HandoverUnusable  it came and can't be used: recompute
    └── GoldenError           a golden directory lacks what a comparison needs
"""


class AdapterError(Exception):
    """Root of the tree. The message says what was wrong, with the value, and what to do."""


class ConfigError(AdapterError):
    """`config.json` lacks a key, holds an impossible value, or names what is not implemented."""


class CheckpointError(AdapterError):
    """The checkpoint directory can't be used."""


class ShardError(CheckpointError):
    """A file of the checkpoint is missing, truncated or not safetensors; the message names it."""


class TensorError(CheckpointError):
    """A tensor is missing, has a wrong shape or dtype, or lacks its scale or its weight."""


class CacheError(AdapterError):
    """A sequence cache does not hold what was asked for, or the bytes given do not fit it."""


class SnapshotError(CacheError):
    """A snapshot or hand-over record can't be used here; the message says why. Compute anew."""


class SectionsLost(CacheError):
    """Sections that were on their way to the cache did not come: load again, or compute."""


class InputError(AdapterError):
    """Token ids, a hit length or a mode that can't be right; nothing was computed."""


class ChatError(InputError):
    """A message, role, tool or option that the chat format has no place for.

    The message names the entry (`messages[3].role`) and its value.
    """


class ImageError(InputError):
    """A picture that can't be read or is too large, or images that don't fit their prompt."""


class HandoverError(AdapterError):
    """A request is not handed over from prefill to decode. `exit_status`: of the command line."""

    exit_status = 2


class HandoverLost(HandoverError):
    """A part of it did not come, or was not taken, in time; run the prefill again and retry."""

    exit_status = 3


class HandoverUnusable(HandoverError):
    """What came can't be used, or blocks that belong to it have gone; recompute."""

    exit_status = 4


class GoldenError(AdapterError):
    """A golden directory lacks what a comparison needs."""
