"""The process that is killed: writes to a log as fast as it can, and says what was promised.

`kill_writer.py DIRECTORY FIRST`: frames are named FIRST, FIRST + 1, …. Lines on standard output,
one write each: `durable NAME` once a frame is, `going NAME…` before frames are removed.
"""

import os
import sys
from pathlib import Path
from random import Random

from log_workload import CONFIG

from kvstore.testing.tiers_frames import (
    DESCRIPTOR,
    NAMESPACE_ID,
    Stored,
    key_of,
    load,
    make_frame,
    make_room,
    rows,
)
from kvstore.tiers.base import WriteItem
from kvstore.tiers.ssd import SsdTier


def frame_of(name: int) -> memoryview:
    """The frame that goes by this name, in whatever process."""
    random = Random(name)
    lengths = [random.randint(1, 9000) for _ in range(random.randint(1, 3))]
    return make_frame(key_of(name), lengths, packable=name % 2 == 1)


def say(word: str, names: list[int]) -> None:
    os.write(1, f"{word} {' '.join(map(str, names))}\n".encode())


def main(directory: Path, first: int) -> None:
    tier, recovered = SsdTier.open(directory, CONFIG)
    number = tier.put_namespace(NAMESPACE_ID, DESCRIPTOR)
    names = {key_of(name): name for name in range(first)}
    live = {
        key: Stored(key, load(tier, location, length), location)
        for key, (location, length) in rows(recovered).items()
    }
    random = Random(first)
    say("open", [])
    while True:
        items, batch = [], range(first, first := first + random.randint(1, 6))
        for name in batch:
            names[key_of(name)] = name
            frame = frame_of(name)
            while (location := tier.place(len(frame))) is None:
                # Said before it is done: from now on they may be gone.
                say("going", [names[key] for key in list(live)[:10]])
                make_room(tier, live, 10)
            items.append(WriteItem(location, key_of(name), number, frame))
        assert not any(tier.write_batch(items))
        say("durable", list(batch))
        live.update({i.key: Stored(i.key, i.frame, i.location) for i in items})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
