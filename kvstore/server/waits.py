"""Waits that end with the daemon."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvstore.errors import Unavailable

T = TypeVar("T")


async def unless(draining: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is given up with `Unavailable` when the daemon drains."""
    waiting = asyncio.create_task(work)
    ending = asyncio.create_task(draining.wait())
    try:
        await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Unavailable("the daemon is draining")
        return waiting.result()
    finally:
        waiting.cancel()
        ending.cancel()
