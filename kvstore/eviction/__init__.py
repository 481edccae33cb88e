"""Who goes: policies that order the rows of one tier."""

from kvstore.eviction.base import EvictionPolicy
from kvstore.eviction.lru import LRU

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU}
"""Every policy by the name that the configuration uses."""

__all__ = ["LRU", "POLICIES", "EvictionPolicy"]
