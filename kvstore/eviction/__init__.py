"""Who goes: policies that order the rows of one tier."""

from kvstore.block import Outlook
from kvstore.eviction.arc import Arc
from kvstore.eviction.base import ALONE, EvictionPolicy, Surroundings, own_end
from kvstore.eviction.gittins import Gittins
from kvstore.eviction.lru import LRU
from kvstore.eviction.s3_fifo import S3Fifo
from kvstore.eviction.sieve import Sieve
from kvstore.eviction.w_tinylfu import WTinyLfu

POLICIES: dict[str, type[EvictionPolicy]] = {
    "arc": Arc,
    "gittins": Gittins,
    "lru": LRU,
    "s3_fifo": S3Fifo,
    "sieve": Sieve,
    "w_tinylfu": WTinyLfu,
}
"""Every policy by the name that the configuration uses."""

__all__ = [
    "ALONE",
    "LRU",
    "POLICIES",
    "Arc",
    "EvictionPolicy",
    "Gittins",
    "Outlook",
    "S3Fifo",
    "Sieve",
    "Surroundings",
    "WTinyLfu",
    "own_end",
]
