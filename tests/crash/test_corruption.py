"""Damaged files of a real store: never a wrong byte, nothing lost that the damage did not hit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from log_workload import CONFIG

from kvstore.errors import StoreFormatError
from kvstore.testing.tiers_frames import key_of, load, make_frame, rows, store
from kvstore.tiers.frame import decode_header, verify_frame
from kvstore.tiers.ssd import SsdTier

Frames = dict[bytes, tuple[bytes, int]]
ROUNDS = 40
ROUNDS_LONG = range(1000, 2000)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Frames]:
    """A store of several segments with dead frames among the live, and what it holds: per key the
    frame and its segment."""
    directory = tmp_path_factory.mktemp("sound") / "store"
    random = Random(0)
    tier, _ = SsdTier.open(directory, CONFIG)
    held = []
    for batch in range(8):
        frames = [
            make_frame(key_of((batch, i)), [random.randint(1, 9000), 500], packable=i % 2 == 1)
            for i in range(6)
        ]
        held += store(tier, frames)
        gone = [held.pop(random.randrange(len(held))) for _ in range(2)]
        tier.remove([s.key for s in gone])
    tier.close()
    assert len({s.location.segment for s in held}) >= 4
    return directory, {s.key: (bytes(s.frame), s.location.segment) for s in held}


def flip(data: bytearray, random: Random) -> None:
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def flip_many(data: bytearray, random: Random) -> None:
    for _ in range(random.randint(2, 60)):
        flip(data, random)


def overwrite(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data))
    n = min(len(data) - at, random.choice([8, 512, 4096, 20_000]))
    data[at : at + n] = random.randbytes(n)


def zero(data: bytearray, random: Random) -> None:
    at = random.randrange(len(data)) // 512 * 512
    n = min(len(data) - at, random.choice([512, 4096, 40_000, len(data)]))
    data[at : at + n] = bytes(n)


def truncate(data: bytearray, random: Random) -> None:
    del data[random.choice([0, random.randrange(len(data)), len(data) // 4096 * 2048]) :]


def extend(data: bytearray, random: Random) -> None:
    data += random.randbytes(random.choice([1, 511, 4096, 10_000]))


def shuffle_pages(data: bytearray, random: Random) -> None:
    pages = len(data) // 4096
    if pages < 2:
        return flip(data, random)
    a, b = random.sample(range(pages), 2)
    first, second = (bytes(data[p * 4096 : p * 4096 + 4096]) for p in (a, b))
    data[a * 4096 : a * 4096 + 4096] = second
    data[b * 4096 : b * 4096 + 4096] = first


DAMAGES: list[Callable[[bytearray, Random], None]] = [
    flip,
    flip_many,
    overwrite,
    zero,
    truncate,
    extend,
    shuffle_pages,
]


def damage(path: Path, random: Random) -> str:
    """Hurt one file; says how."""
    if not path.exists():
        return "gone already"
    if random.random() < 0.1:
        path.unlink()
        return "deleted"
    how = random.choice(DAMAGES)
    data = bytearray(path.read_bytes())
    if not data:
        return "left empty"
    how(data, random)
    path.write_bytes(data)
    return how.__name__


def number_of(path: Path) -> int:
    return int(path.stem)


def check(directory: Path, frames: Frames, hurt: set[int]) -> None:
    """Right bytes or none; what lies in segments that are not `hurt` is all there."""
    tier, recovered = SsdTier.open(directory, CONFIG)
    right = set()
    for key, (location, length) in rows(recovered).items():
        got = load(tier, location, length)
        if verify_frame(got, key) is None and key in frames:
            *_, last = decode_header(got).sections
            end = last.offset + last.length
            assert got[:end] == frames[key][0][:end]
            right.add(key)
    safe = {key for key, (_, segment) in frames.items() if segment not in hurt}
    assert safe <= right, f"{len(safe - right)} objects that nothing had hit are lost"
    tier.check_integrity()
    (new,) = store(tier, [make_frame(key_of("new"), (6000,))])
    tier.close()
    tier, recovered = SsdTier.open(directory, CONFIG)
    assert not recovered.rebuilt
    assert right | {new.key} <= set(recovered.keys)
    assert load(tier, new.location, new.length) == new.frame
    tier.close()


def hurt_files(files: list[Path], random: Random) -> tuple[list[str], set[int]]:
    """Hurt some of them; says which, and which segments among them."""
    chosen = random.sample(files, random.choice([1, 1, 1, 2]))
    said = [f"{path.name}: {damage(path, random)}" for path in chosen]
    return said, {number_of(p) for p in chosen if p.suffix == ".seg"}


def copy_of(sound: Path, target: Path, unclean: bool) -> list[Path]:
    """A copy of a store, its files; `unclean`: as if it had been killed."""
    shutil.copytree(sound, target)
    if unclean:
        (target / "index.lmdb" / "clean").unlink()
    return sorted(p for p in target.rglob("*") if p.is_file())


@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("what", ["any", "data.mdb"])
def test_damage_never_yields_a_wrong_byte(
    sound: tuple[Path, Frames], tmp_path: Path, seed: int, what: str
) -> None:
    damage_and_check(sound, tmp_path, seed, what)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_much_damage_never_yields_a_wrong_byte(sound: tuple[Path, Frames], tmp_path: Path) -> None:
    for seed in ROUNDS_LONG:
        damage_and_check(sound, tmp_path / str(seed), seed, "any")
        shutil.rmtree(tmp_path / str(seed))


def damage_and_check(sound: tuple[Path, Frames], tmp_path: Path, seed: int, what: str) -> None:
    """One round of the fuzz: copy, hurt, open, check."""
    directory, frames = sound
    random = Random(f"{what}{seed}")
    files = copy_of(directory, tmp_path / "store", unclean=random.random() < 0.5)
    if what != "any":
        files = [p for p in files if p.name == what] * 2
    said, hurt = hurt_files(files, random)
    print(said)
    if any(s.startswith("tenant.secret") and "deleted" not in s for s in said):
        with pytest.raises(StoreFormatError, match=r"tenant\.secret is damaged; restore it"):
            SsdTier.open(tmp_path / "store", CONFIG)
        (tmp_path / "store" / "tenant.secret").unlink()
    check(tmp_path / "store", frames, hurt)


@pytest.mark.parametrize("unclean", [False, True])
def test_every_page_of_the_index_may_be_lost(
    sound: tuple[Path, Frames], tmp_path: Path, unclean: bool
) -> None:
    directory, frames = sound
    size = (directory / "index.lmdb" / "data.mdb").stat().st_size
    for page in range(size // 4096):
        target = tmp_path / str(page)
        copy_of(directory, target, unclean)
        path = target / "index.lmdb" / "data.mdb"
        data = bytearray(path.read_bytes())
        data[page * 4096 : page * 4096 + 4096] = bytes(4096)
        path.write_bytes(data)
        check(target, frames, set())


@pytest.mark.parametrize("name", ["data.mdb", "index.lmdb"])
def test_a_missing_index_is_rebuilt_from_the_frames(
    sound: tuple[Path, Frames], tmp_path: Path, name: str
) -> None:
    directory, frames = sound
    target = tmp_path / "store"
    copy_of(directory, target, unclean=False)
    gone = next(target.rglob(name))
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    tier, recovered = SsdTier.open(target, CONFIG)
    assert recovered.rebuilt
    assert set(frames) <= set(recovered.keys)
    assert any("rebuilt from the frames" in note for note in recovered.notes)
    by_id = {n.namespace_id: n for n in recovered.namespaces}
    assert [n.descriptor for n in by_id.values()] == [b""]
    tier.close()


def test_a_broken_index_is_set_aside_and_not_deleted(
    sound: tuple[Path, Frames], tmp_path: Path
) -> None:
    directory, frames = sound
    target = tmp_path / "store"
    copy_of(directory, target, unclean=False)
    path = target / "index.lmdb" / "data.mdb"
    broken = bytearray(path.read_bytes())
    broken[4096 * 3 + 40 :] = bytes(len(broken) - 4096 * 3 - 40)
    path.write_bytes(broken)
    check(target, frames, set())
    assert (target / "aside" / "index.lmdb.1" / "data.mdb").read_bytes() == broken


def test_swapped_segments_are_known_by_their_headers(
    sound: tuple[Path, Frames], tmp_path: Path
) -> None:
    directory, frames = sound
    copy_of(directory, tmp_path / "store", unclean=False)
    first, *_, last = sorted((tmp_path / "store" / "segments").iterdir())
    first.rename(tmp_path / "held")
    last.rename(first)
    (tmp_path / "held").rename(last)
    check(tmp_path / "store", frames, set())


def test_no_new_segment_takes_the_name_of_a_renamed_one(
    sound: tuple[Path, Frames], tmp_path: Path
) -> None:
    directory, frames = sound
    copy_of(directory, tmp_path / "store", unclean=False)
    first, *_, last = sorted((tmp_path / "store" / "segments").iterdir())
    first.rename(last.with_name(f"{number_of(last) + 1:08d}.seg"))
    tier, _ = SsdTier.open(tmp_path / "store", CONFIG)
    more = store(tier, [make_frame(key_of(("more", i)), (9000,)) for i in range(12)])
    assert more[-1].location.segment > number_of(last) + 1
    tier.close()
    check(tmp_path / "store", frames, set())


def test_segments_of_another_store_are_set_aside(
    sound: tuple[Path, Frames], tmp_path: Path
) -> None:
    directory, frames = sound
    other, _ = SsdTier.open(tmp_path / "other", CONFIG)
    store(other, [make_frame(key_of("of another"))])
    other.close()
    copy_of(directory, tmp_path / "store", unclean=False)
    segments = sorted((tmp_path / "store" / "segments").iterdir())
    (tmp_path / "other" / "segments" / "00000001.seg").replace(segments[0])
    check(tmp_path / "store", frames, {number_of(segments[0])})
    assert (tmp_path / "store" / "aside" / f"{segments[0].name}.1").exists()


def test_a_lost_format_file_is_written_anew(sound: tuple[Path, Frames], tmp_path: Path) -> None:
    directory, frames = sound
    for name, content in (("gone", None), ("damaged", b"}{")):
        target = tmp_path / name
        copy_of(directory, target, unclean=False)
        before = json.loads((target / "FORMAT").read_text().splitlines()[0])
        (target / "FORMAT").unlink()
        if content is not None:
            (target / "FORMAT").write_bytes(content)
        check(target, frames, set())
        after = json.loads((target / "FORMAT").read_text().splitlines()[0])
        assert after["store_id"] == before["store_id"]


def test_a_segment_with_a_damaged_header_is_still_read(
    sound: tuple[Path, Frames], tmp_path: Path
) -> None:
    directory, frames = sound
    copy_of(directory, tmp_path / "store", unclean=False)
    for path in (tmp_path / "store" / "segments").iterdir():
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    check(tmp_path / "store", frames, set())
