"""Everything that a sequence cache holds, to compare two of them byte for byte."""

from model_adapter.cache import SequenceCache
from model_adapter.dspark import DraftWindows
from model_adapter.records import host


def window_bytes(window) -> dict[str, object]:
    """The records that a query may still see, and where they stand. How many older ones are kept
    to be able to go back depends on how far they were gone back before."""
    return {
        "start": window.start,
        "end": window.end,
        "records": host(window.latest(window._window - 1)).tobytes(),
    }


def cache_bytes(cache: SequenceCache) -> dict[str, object]:
    """By part: global rows, windows, pending rows, token ids and lengths."""
    parts: dict[str, object] = {"length": cache.length, "loaded": cache.loaded_tokens}
    parts["tokens"] = cache.token_ids.tobytes()
    for spec in cache._specs:
        parts[f"{spec.role} {spec.layer}"] = host(cache.rows(spec).rows).tobytes()
    for layer, window in enumerate(cache.windows):
        parts[f"window {layer}"] = window_bytes(window)
    for layer, group in cache.open_groups.items():
        parts[f"pending {layer}"] = (group.end, group.pending().cpu().numpy().tobytes())
    return parts


def draft_bytes(windows: DraftWindows) -> list[dict[str, object]]:
    return [window_bytes(window) for window in windows.layers]


def assert_same(one: dict[str, object], other: dict[str, object]) -> None:
    """Names the parts that differ."""
    assert [k for k in one if one[k] != other.get(k)] == []
    assert one.keys() == other.keys()
