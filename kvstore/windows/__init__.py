"""The window pool: short-lived objects in DRAM alone, under a budget of their own."""

from kvstore.windows.arena import WindowArena
from kvstore.windows.pool import Held, Name, Room, WindowPool

__all__ = ["Held", "Name", "Room", "WindowArena", "WindowPool"]
