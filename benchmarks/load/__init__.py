"""Many clients at once for minutes: nothing lost, nothing leaked."""
