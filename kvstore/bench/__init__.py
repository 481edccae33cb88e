"""Replaying request traces: readers, the simulator, the cost model and the pictures."""
