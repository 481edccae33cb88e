"""The reading side of the log: frames into their memory, adjacent ones at once, many at a time."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvstore.tiers.base import Location, ReadItem
from kvstore.tiers.frame import FrameTruncated
from kvstore.tiers.ssd.aio import Transfer
from kvstore.tiers.ssd.files import FileSystem, disk_error
from kvstore.tiers.ssd.packed import unpack_frame
from kvstore.tiers.ssd.segments import SegmentFiles

_RUN_BYTES_MAX = 1 << 20
"""Of one transfer. Larger ones are no faster, and what arrives early can be checked early."""
_RUN_ITEMS_MAX = 256


class LogReader:
    """See `LogTier`. Safe from any thread."""

    def __init__(self, files: FileSystem, segments: SegmentFiles, queue_depth: int) -> None:
        self._files, self._segments, self._queue_depth = files, segments, queue_depth

    def read_batch(
        self, items: Sequence[ReadItem], arrived: Callable[[int], None] | None
    ) -> list[Exception | None]:
        """See `LogTier`."""
        errors: list[Exception | None] = [None] * len(items)
        runs = _runs(items)
        transfers: list[Transfer] = []
        positions: list[list[int]] = []

        def done(number: int, result: int | OSError) -> None:
            transfer, run = transfers[number], positions[number]
            if result != transfer.length:
                at = Location(items[run[0]].location.segment, transfer.offset)
                for i, error in zip(run, self._whole(at, transfer, result), strict=True):
                    errors[i] = error
            for i in run:
                if errors[i] is None:
                    unpack_frame(items[i].into)
                    if arrived is not None:
                        arrived(i)

        with ExitStack() as stack:
            handles: dict[int, int | OSError] = {}
            for run, length in runs:
                location = items[run[0]].location
                handle = self._handle(location.segment, handles, stack)
                if isinstance(handle, OSError):
                    for i in run:
                        errors[i] = self._error(location, handle)
                    continue
                buffers = [items[i].into for i in run]
                transfers.append(Transfer(handle, buffers, location.offset, length))
                positions.append(run)
            self._files.preadv_many(transfers, self._queue_depth, done)
        return errors

    def _handle(
        self, segment: int, handles: dict[int, int | OSError], stack: ExitStack
    ) -> int | OSError:
        if segment not in handles:
            try:
                handles[segment] = stack.enter_context(self._segments.use(segment))
            except OSError as e:
                handles[segment] = e
        return handles[segment]

    def _error(self, location: Location, error: OSError) -> Exception:
        path = self._segments.path(location.segment)
        if isinstance(error, FileNotFoundError):
            # no later attempt finds it either, as it may what the disk refused to read
            return FrameTruncated(f"{path} is gone")
        return disk_error("reading", path, error)

    def _whole(
        self, at: Location, transfer: Transfer, result: int | OSError
    ) -> list[Exception | None]:
        """Per buffer of a transfer: None where all its bytes came."""
        if isinstance(result, OSError):
            return [self._error(at, result)] * len(transfer.buffers)
        path = self._segments.path(at.segment)
        errors: list[Exception | None] = []
        end = 0
        for buffer in transfer.buffers:
            end += len(buffer)
            short = FrameTruncated(f"{path} ends at {at.offset + result}, the frame behind that")
            errors.append(None if end <= result else short)
        return errors


def _runs(items: Sequence[ReadItem]) -> list[tuple[list[int], int]]:
    """Positions of items that lie one behind the other in one segment, and their bytes, in the
    order of the log."""
    locations = [item.location for item in items]
    runs: list[tuple[list[int], int]] = []
    run: list[int] = []
    in_segment = expected = size = 0
    for i in sorted(range(len(items)), key=locations.__getitem__):
        segment, offset = locations[i]
        length = len(items[i].into)
        if (
            run
            and offset == expected
            and segment == in_segment
            and size + length <= _RUN_BYTES_MAX
            and len(run) < _RUN_ITEMS_MAX
        ):
            run.append(i)
            size += length
        else:
            if run:
                runs.append((run, size))
            run, size, in_segment = [i], length, segment
        expected = offset + length
    if run:
        runs.append((run, size))
    return runs
