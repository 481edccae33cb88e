"""The daemon: the store behind gRPC. With `kvstore.client`, the only room that knows protobuf.

`status`, `messages` and `wire` are what both sides of the wire share; `service` answers calls;
`daemon` opens the door, watches health and signals, and drains.
"""
