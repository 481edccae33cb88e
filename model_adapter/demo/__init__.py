"""`make demo`: real agent sessions on the `small` preset, without a store, with one, and warm."""
