"""Steps that tests of the hand-driven core share."""

from store_harness import HandDrivenStore, store_config


def check(store: HandDrivenStore) -> None:
    store.core.check_integrity()


def tight(**settings) -> HandDrivenStore:
    """16 blocks of DRAM, and an SSD of about 190 in segments of 15."""
    given = {"dram.budget_bytes": 16 * 4096, "ssd.segment_bytes": "64KiB", "eviction.policy": "lru"}
    return HandDrivenStore(store_config(**given, **{"ssd.budget_bytes": "1MiB"} | settings))


def failing(store: HandDrivenStore, *what: str) -> None:
    """Every operation of the disk named in `what` fails from now on."""

    def before(op, path):
        if op in what:
            raise OSError(5, "Input/output error")

    store.disk.before = before
