"""Who holds blocks, and until when."""

from kvstore.lease.table import Right, RightsTable

__all__ = ["Right", "RightsTable"]
