"""The data port: the service's hot calls and block bytes over a plain stream socket.

`frames` is what both sides share. `port` listens and keeps the connections, `connection` moves one
peer's frames, `calls` answers them, `tokens` says who may connect.
"""
