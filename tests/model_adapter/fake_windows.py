"""The window pool's part of a client, in memory, around a client without one."""

from dataclasses import dataclass

import numpy as np

from kvstore import Match, NamespaceHandle, PutOutcome, snapshot_key


@dataclass(frozen=True, slots=True)
class Ref:
    key: bytes
    blocks: int
    tail_tokens: int
    payload_bytes: int


@dataclass(frozen=True)
class MatchWithSnapshots(Match):
    snapshots: tuple[Ref, ...] = ()


class Handle(NamespaceHandle):
    def snapshot_key(self, token_ids, images=()):
        keys = [self.id, *self.block_keys(token_ids, images)]
        start = (len(keys) - 1) * self.layout.block_tokens
        return snapshot_key(keys[-1], np.asarray(token_ids)[start:], start, images)

    def longest_snapshot(self, match, token_ids, images=()):
        for ref in match.snapshots:
            position = ref.blocks * self.layout.block_tokens + ref.tail_tokens
            if position < len(token_ids) and ref.blocks <= match.hit_blocks:
                on = [i for i in images if i.start + i.length <= position]
                if self.snapshot_key(token_ids[:position], on) == ref.key:
                    return ref
        return None


class FakeWindows:
    def __init__(self, client) -> None:
        self._client = client
        self.objects: dict[bytes, tuple[bytes, Ref, bytes]] = {}
        self.handovers: dict[str, bytes] = {}

    def __getattr__(self, name):
        return getattr(self._client, name)

    def open_namespace(self, namespace):
        return Handle(self._client.open_namespace(namespace).id, namespace)

    def match(self, handle, keys):
        found = self._client.match(handle, keys)
        parents = {handle.id, *keys}
        refs = [ref for parent, ref, _ in self.objects.values() if parent in parents]
        refs.sort(key=lambda r: (r.blocks, r.tail_tokens), reverse=True)
        names = ("hit_blocks", "outcomes", "residency", "block_bytes", "costs")
        return MatchWithSnapshots(*(getattr(found, n) for n in names), tuple(refs))

    def put_snapshot(self, handle, token_ids, payload, *, images=(), ttl_s=None):
        keys = [handle.id, *handle.block_keys(token_ids, images)]
        blocks = len(keys) - 1
        tail = len(token_ids) - blocks * handle.layout.block_tokens
        key = handle.snapshot_key(token_ids, images)
        self.objects[key] = (keys[-1], Ref(key, blocks, tail, len(payload)), bytes(payload))
        return PutOutcome.STORED

    def get_window(self, handle, key):
        held = self.objects.get(key)
        return None if held is None else held[2]
