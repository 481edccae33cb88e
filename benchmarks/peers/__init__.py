"""Other systems, measured with the same sizes: `python -m benchmarks.peers.run`."""
