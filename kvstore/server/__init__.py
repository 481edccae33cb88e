"""The daemon: the store behind gRPC. With `kvstore.client`, the only room that knows protobuf.

`status`, `messages`, `wire` and `address` are what both sides of the wire share, so the client
imports them, and nothing here imports the client. `service` answers calls; `gate` is what each of
them passes; `daemon` opens the door, watches health and signals, and drains.
"""
