"""The HBM tier: a fixed pool of a device's memory, reached by asynchronous copies."""

from kvstore.tiers.hbm.tier import HbmTier

__all__ = ["HbmTier"]
