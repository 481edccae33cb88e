"""Counters of the store: plain integers with a name and a help text, cheap enough for every step.

A leaf: who wants them in Prometheus' form reads `Metrics.counts` and `COUNTERS`. A name that is not
in `COUNTERS` is a programming error and raises `KeyError` at once.
"""

COUNTERS = {
    "lookup_hit_hbm_blocks": "Keys looked up whose fastest tier was hbm",
    "lookup_hit_dram_blocks": "Keys looked up whose fastest tier was dram",
    "lookup_hit_ssd_blocks": "Keys looked up whose fastest tier was ssd",
    "lookup_pending_blocks": "Keys looked up that a writer had reserved",
    "lookup_miss_blocks": "Keys looked up that were not there, or lay behind one that was not",
    "put_stored_blocks": "Blocks accepted",
    "put_present_blocks": "Blocks put again; the first writer's bytes stay",
    "put_pending_blocks": "Blocks put while another writer held the reservation",
    "put_no_space_blocks": "Blocks refused because nothing could make room",
    "put_parent_missing_blocks": "Blocks refused because their parent was not there",
    "put_corrupt_blocks": "Blocks refused because bytes and checksum disagreed on arrival",
    "read_hbm_blocks": "Blocks read from a device's pool, by way of the host",
    "read_dram_blocks": "Blocks read from the arena",
    "read_ssd_blocks": "Blocks read from a segment",
    "read_miss_blocks": "Blocks asked for in a read that were not there any more",
    "read_payload_bytes": "Section bytes handed to readers",
    "written_payload_bytes": "Section bytes accepted from writers",
    "promoted_blocks": "Blocks copied from ssd into dram",
    "read_ahead_blocks": "Blocks whose read from ssd was begun before they were asked for",
    "promoted_hbm_blocks": "Blocks copied from dram into hbm",
    "promoted_hbm_bytes": "Frame bytes copied from dram into hbm",
    "demoted_hbm_blocks": "Blocks that left hbm and stayed on another tier",
    "copied_back_blocks": "Blocks copied from hbm into dram, for readers, demotion or writing",
    "bounced_blocks": "Blocks read past a dram full of pinned blocks",
    "demoted_blocks": "Blocks that left dram and stayed on ssd",
    "write_back_blocks": "Blocks made durable on ssd",
    "write_back_bytes": "Frame bytes made durable on ssd, compaction not included",
    "compacted_blocks": "Blocks appended again to reclaim their segment",
    "compacted_bytes": "Frame bytes appended again to reclaim their segment",
    "segments_reclaimed": "Segments deleted after compaction or eviction",
    "evicted_hbm_blocks": "Blocks that the policy dropped from hbm with no copy left",
    "evicted_dram_blocks": "Blocks that the policy dropped from dram with no copy left",
    "evicted_ssd_blocks": "Blocks that the policy dropped from ssd",
    "declined_ssd_blocks": "Blocks kept out of a full ssd whose policy prefers what it holds",
    "refused_ssd_blocks": "Blocks kept out of an ssd full of blocks under ssd.lifetime_min_s",
    "evicted_by_request_blocks": "Blocks dropped because a caller asked",
    "corrupt_hbm_blocks": "Blocks quarantined for a checksum mismatch in what came from hbm",
    "corrupt_dram_blocks": "Blocks quarantined for a checksum mismatch in dram",
    "corrupt_ssd_blocks": "Blocks quarantined for a checksum mismatch on ssd",
    "corrupt_windows": "Window snapshots and hand-over records with a wrong checksum",
    "corrupt_reported_blocks": "Reports of corruption by clients",
    "disk_errors": "Failed disk operations",
    "device_errors": "Copies to or from a device that failed",
    "located_hbm_blocks": "Blocks whose place in a device's pool was told to a reader on this host",
    "located_blocks": "Blocks whose place in the arena was told to a reader on this host",
    "port_connections": "Connections to the data port that showed a valid token",
    "port_refused_tokens": "Connections to the data port with a wrong or stale token",
    "port_malformed_frames": "Frames on the data port that were none, or over a limit",
    "port_stalled": "Connections to the data port that stood still in the middle of a frame",
    "port_broken": "Connections to the data port that ended in the middle of a frame",
    "windows_stored": "Window snapshots and hand-over records accepted, replaced ones included",
    "windows_hit": "Gets of a window snapshot or hand-over record that found it",
    "windows_miss": "Gets of a window snapshot or hand-over record that was not there",
    "windows_expired": "Window snapshots and hand-over records whose time was over",
    "windows_evicted": "Window snapshots and hand-over records that made room for others",
    "windows_refused": "Puts that found the window pool full of what can't go",
    "answers_told": "Ends of answers that clients told of",
    "leases_granted": "Leases granted",
    "leases_expired": "Leases that lapsed unreleased",
    "reservations_granted": "Reservations granted",
    "reservations_expired": "Reservations that lapsed uncommitted",
}


class Metrics:
    """A registry: `counts[name]` is the value of every counter in `COUNTERS`."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, n: int = 1) -> None:
        """Count `n` more. Raises `KeyError` for a name that is not in `COUNTERS`."""
        self.counts[name] += n
