"""The SSD tier: segments, frames, and the index that finds them."""

from kvstore.tiers.ssd.tier import SsdTier

__all__ = ["SsdTier"]
