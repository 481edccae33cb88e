"""Sections read in the order in which the model needs them, while it computes already.

A replay needs the first source's rows at the first source's layer, and the decoder's rows only
behind the whole encoder. So the sections of all blocks come one after the other instead of block by
block, each straight into the cache's memory, on a thread of their own; the forward pass waits for
the section that it has come to (`SequenceCache.promise_blocks`).

A block that is missing in some section, or a store that is lost, fails that section and all behind
it: the forward pass ends with `SectionsLost`, and the request starts over.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import Lease
from kvstore.errors import KVStoreError
from model_adapter.cache import Promise
from model_adapter.devices import side_stream
from model_adapter.errors import SectionsLost
from model_adapter.session.leased_blocks import LeasedBlocks

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Reading:
    """What became of it, once `done`. `seconds`: from its start to the last section. `error`: of
    the store, where that was lost; `complete`: whether every section came."""

    seconds: float = 0.0
    error: str | None = None
    complete: bool = False
    done: bool = False


class ReadAhead:
    """Fills promised sections of the leased blocks; gives the lease back at the end."""

    def __init__(
        self,
        blocks: LeasedBlocks,
        lease: Lease,
        promises: Sequence[Promise],
        batch_bytes_max: int,
    ) -> None:
        self.reading = Reading()
        self._blocks = blocks
        self._lease = lease
        self._promises = promises
        self._batch_bytes_max = batch_bytes_max
        self._renewed_s = time.monotonic()
        self._stream = side_stream(promises[0].rows.device)
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def join(self) -> Reading:
        """Wait for its end, which the deadlines of its calls bound."""
        self._thread.join()
        return self.reading

    def _run(self) -> None:
        start = time.perf_counter()
        lost: SectionsLost | None = None
        left = list(enumerate(self._promises))
        try:
            with self._lease, self._stream:
                while left:
                    number, promise = left[0]
                    self._read(number, promise)
                    promise.done.set_result(None)
                    left.pop(0)
            self.reading.complete = True
        except SectionsLost as e:
            lost = e
        except KVStoreError as e:
            self.reading.error = f"{type(e).__name__} while reading ahead: {e}"
            lost = SectionsLost(self.reading.error)
        except BaseException as e:
            lost = SectionsLost(f"reading ahead failed: {e!r}")
            raise
        finally:
            self.reading.seconds = time.perf_counter() - start
            self.reading.done = True
            for _, promise in left:
                promise.done.set_exception(lost or SectionsLost("reading ahead ended"))
            # the memory is the cache's, which may go before whoever looks at `reading`
            self._promises = ()

    def _read(self, number: int, promise: Promise) -> None:
        """One section of all blocks, in batches."""
        keys = self._lease.keys
        rows = len(promise.rows) // len(keys)
        size = rows * promise.rows.shape[1]
        step = max(1, self._batch_bytes_max // size)
        for at in range(0, len(keys), step):
            self._keep_lease()
            batch = keys[at : at + step]
            into = promise.rows[at * rows : (at + len(batch)) * rows]
            self._blocks.load_section(self._lease, batch, number, at, into)

    def _keep_lease(self) -> None:
        now_s = time.monotonic()
        if now_s - self._renewed_s > self._lease.ttl_s / 2:
            self._lease.renew()
            self._renewed_s = now_s
