"""The DRAM tier: one arena with a fixed budget."""

from kvstore.tiers.dram.tier import DramTier

__all__ = ["DramTier"]
