"""Every crash of a recorded life of the log: kill -9, power loss, torn and reordered writes.

The simulated disk (`kvstore.testing.disk`) says what may be lost. LMDB's commit counts as one step,
absent before and durable after it: that is LMDB's own promise, kept by its own file, which the
tests with a real index build on.
"""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from log_workload import CONFIG, Ledger, Workload, check, open_log, reopened

from kvstore.testing.disk import DiskState, History, SimDisk, SimIndexState
from kvstore.testing.tiers_frames import load, rows
from kvstore.tiers.frame import verify_frame
from kvstore.tiers.ssd import SsdTier
from kvstore.tiers.ssd.index import IndexChange, LmdbIndex

TORN_STATES_PER_CUT = 6
SEEDS = range(3)
SEEDS_LONG = range(100, 140)
STEPS = 24


def recorded(seed: int, disk: SimDisk | None = None) -> tuple[History, Ledger]:
    workload = Workload(seed, disk)
    workload.run(STEPS)
    workload.tier.close()
    return History(workload.disk.log), workload.ledger


def test_the_workload_does_everything_that_is_to_be_cut() -> None:
    ops = [op for seed in SEEDS for op in recorded(seed)[0].ops]
    what = Counter(op.what for op in ops)
    assert {"mkdir", "create", "write", "sync", "sync_dir", "rename", "commit"} <= set(what)
    assert what["unlink"] >= 2 * len(SEEDS), "segments are dropped"
    assert what["truncate"] >= 2, "tails are cut"
    assert any(op.change and op.change.removes for op in ops)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_crash_leaves_a_log_that_opens_with_every_durable_object(seed: int) -> None:
    states, adopted, cut_bytes = enumerate_crashes(seed)
    assert states > 500
    assert adopted > 0
    assert cut_bytes > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS_LONG)
def test_so_do_the_crashes_of_many_other_lives(seed: int) -> None:
    states, _, _ = enumerate_crashes(seed)
    assert states > 500


def enumerate_crashes(seed: int) -> tuple[int, int, int]:
    """Check every crash of one life: states, frames adopted in them, bytes cut off in them."""
    history, ledger = recorded(seed)
    random = Random(seed)
    states = adopted = cut_bytes = 0
    for cut in range(len(history.ops) + 1):
        durable = ledger.durable(cut)
        unsettled = history.unsettled(cut)
        candidates = [history.state(cut)]
        if unsettled:
            candidates.append(history.state(cut, dict.fromkeys(unsettled)))
            candidates += [history.torn(cut, random) for _ in range(TORN_STATES_PER_CUT)]
        for i, state in enumerate(candidates):
            try:
                go_on = i < 2 or random.random() < 0.25
                recovered = check(reopened(state), ledger, durable, go_on)
            except Exception as e:
                e.add_note(f"seed {seed}, cut {cut} of {len(history.ops)}, state {i}")
                raise
            adopted += recovered.adopted
            cut_bytes += recovered.cut_bytes
        states += len(candidates)
    print(f"seed {seed}: {len(history.ops)} operations, {states} states")
    return states, adopted, cut_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_a_crash_while_recovering_from_a_crash_loses_nothing_either(seed: int) -> None:
    history, ledger = recorded(seed)
    random = Random(seed)
    states = 0
    for _ in range(12):
        cut = random.randrange(len(history.ops) // 4, len(history.ops))
        durable = ledger.durable(cut)
        disk = reopened(history.torn(cut, random))
        base = reopened(disk.state)
        before = History((), base.state).state(0)
        open_log(disk)[0].close()
        second = History(disk.log, before)
        for again in range(len(second.ops) + 1):
            check(reopened(second.state(again)), ledger, durable, go_on=False)
            check(reopened(second.torn(again, random)), ledger, durable)
            states += 2
    assert states > 30


class ForgetfulDisk(SimDisk):
    """Says that it synced files, and does not: what a missing fdatasync would look like."""

    def fdatasync(self, handle: int) -> None:
        self._file("fdatasync", handle)


def test_the_enumeration_would_notice_a_missing_sync() -> None:
    history, ledger = recorded(0, ForgetfulDisk())
    random = Random(0)
    caught = 0
    for cut in range(0, len(history.ops) + 1, 5):
        try:
            check(reopened(history.torn(cut, random)), ledger, ledger.durable(cut))
        except Exception:
            caught += 1
    assert caught > 5


def materialise(state: DiskState, root: Path) -> None:
    """The same disk as real files and a real LMDB."""
    for folder in sorted(state.dirs):
        (root / folder[1:]).mkdir(exist_ok=True)
    for path, inode in state.names.items():
        target = root / path[1:]
        content = state.contents[inode]
        if isinstance(content, SimIndexState):
            index = LmdbIndex(target.parent, content.store_id, 1 << 24, sync=False, create=True)
            index.commit(
                IndexChange(
                    list(content.blocks.items()),
                    (),
                    content.log_end,
                    list(content.namespaces.values()),
                )
            )
            index.close(clean=False)
        else:
            target.write_bytes(content)


def test_real_files_and_a_real_index_recover_as_the_simulated_ones_do(tmp_path: Path) -> None:
    history, ledger = recorded(1)
    random = Random(1)
    for round_ in range(25):
        cut = random.randrange(len(history.ops) // 5, len(history.ops) + 1)
        lost = random.choice([{}, dict.fromkeys(history.unsettled(cut))])
        root = tmp_path / str(round_)
        root.mkdir()
        materialise(history.state(cut, lost), root)
        simulated_tier, simulated = open_log(reopened(history.state(cut, lost)))
        tier, recovered = SsdTier.open(root / "srv" / "store", CONFIG)
        assert rows(recovered) == rows(simulated)
        assert (recovered.adopted, recovered.cut_bytes) == (simulated.adopted, simulated.cut_bytes)
        assert ledger.durable(cut) <= set(recovered.keys)
        for key, (location, length) in rows(recovered).items():
            assert verify_frame(load(tier, location, length), key) is None
        assert tier.live_bytes == simulated_tier.live_bytes
        tier.close()
