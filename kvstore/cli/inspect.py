"""`kvstore stat`, `ls`, `verify`, `evict`: a look into a store, through its daemon or offline."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvstore.block import Tier
from kvstore.cli import named, output
from kvstore.client import Client, connect
from kvstore.client.url import parse_url
from kvstore.config import ServerConfig
from kvstore.errors import InvalidRequest, UnsupportedURL
from kvstore.namespace import DIGEST_BYTES

EXIT_WRONG = 1
DEADLINE_S_DEFAULT = 30.0

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="KVSTORE_URL",
        help="unix:///path/of.sock, dns:///host:port, or file:///dir while no daemon serves it.",
    ),
]
DeadlineOption = Annotated[float, typer.Option("--deadline", help="Seconds per call.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", help="Only this namespace (64 hex digits).")
]
STORE_DEFAULT = ServerConfig().listen


def _offline_settings(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise UnsupportedURL(f"file://{directory}: there is no such directory, so no store in it")
    if not (directory / "FORMAT").exists():
        raise UnsupportedURL(f"file://{directory}: the directory holds no store (no FORMAT file)")
    return {"ssd": {"budget_bytes": output.UNBOUNDED_BYTES, "free_floor_bytes": 0}}


@contextmanager
def _store(url: str, deadline_s: float) -> Iterator[Client]:
    parsed = parse_url(url)
    settings = _offline_settings(parsed.path) if parsed.scheme == "file" else {}
    with connect(url, deadline_s=deadline_s, **settings) as client:
        yield client


def _hex(text: str | None, what: str) -> bytes | None:
    if text is None:
        return None
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != DIGEST_BYTES:
        raise InvalidRequest(f"{what} {text!r} is not {2 * DIGEST_BYTES} hex digits")
    return value


def _tier(name: str | None) -> Tier | None:
    if name is None:
        return None
    known = {str(t.name).lower(): t for t in (Tier.HBM, Tier.DRAM, Tier.SSD)}
    if name.lower() not in known:
        raise InvalidRequest(f"tier {name!r} is none of {', '.join(known)}")
    return known[name.lower()]


def stat(
    store: StoreOption = STORE_DEFAULT,
    json: JsonOption = False,
    deadline_s: DeadlineOption = DEADLINE_S_DEFAULT,
) -> None:
    """Tiers, bytes, blocks, and what lookups found."""
    with _store(store, deadline_s) as client:
        found = client.stat()
    if json:
        output.print_json(output.stat_json(found))
    else:
        output.print_stat(Console(), found, stopped=parse_url(store).scheme == "file")


def ls(
    store: StoreOption = STORE_DEFAULT,
    namespace: NamespaceOption = None,
    limit: Annotated[int, typer.Option(help="Blocks to show at most.")] = 100,
    after: Annotated[
        str | None, typer.Option(help="Go on behind this key (64 hex digits).")
    ] = None,
    json: JsonOption = False,
    deadline_s: DeadlineOption = DEADLINE_S_DEFAULT,
) -> None:
    """Blocks: key, depth, tiers, bytes, pins, age.

    pins: leases and calls that hold the block; while there are any it does not leave. dirty: not on
    ssd yet, so that it would be lost with the memory.
    """
    namespace_id, start = _hex(namespace, "namespace"), _hex(after, "key")
    with _store(store, deadline_s) as client:
        blocks = client.ls(namespace_id, limit, start)
    if json:
        output.print_json([output.info_json(b) for b in blocks])
    else:
        output.print_ls(Console(), blocks, limit)


def verify(
    store: StoreOption = STORE_DEFAULT,
    json: JsonOption = False,
    deadline_s: DeadlineOption = 24 * 3600.0,
) -> None:
    """Read and check every frame. Exit code 1 when one is corrupt or can't be read."""
    with (
        _store(store, min(deadline_s, DEADLINE_S_DEFAULT)) as client,
        Progress(console=Console(stderr=True), transient=True) as bar,
    ):
        task = bar.add_task("verify", total=None)
        report = client.verify(
            lambda done, total: bar.update(task, completed=done, total=total), deadline_s
        )
    if json:
        output.print_json(output.report_json(report))
    else:
        output.print_report(Console(), report)
    if not report.clean:
        sys.exit(EXIT_WRONG)


def evict(
    store: StoreOption = STORE_DEFAULT,
    namespace: NamespaceOption = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="Only this block (64 hex digits, or enough of the first); repeatable."),
    ] = None,
    with_children: Annotated[
        bool, typer.Option("--with-children", help="And the blocks that lie behind each --key.")
    ] = False,
    tier: Annotated[str | None, typer.Option(help="Only from this tier: hbm, dram or ssd.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="From every namespace; needed without --namespace, --key.")
    ] = False,
    deadline_s: DeadlineOption = DEADLINE_S_DEFAULT,
) -> None:
    """Drop blocks, leaf first. Those in use, under a lease or on their way to SSD stay.

    Exit code 1 where a --key is given and nothing went.
    """
    namespace_id = _hex(namespace, "namespace")
    only = _tier(tier)
    for text in key or ():
        named.check_prefix(text)
    if namespace_id is None and not key and not everything:
        raise InvalidRequest("name a --namespace or a --key, or say --all to evict from every one")
    if with_children and not key:
        raise InvalidRequest("--with-children needs the --key whose children are meant")
    with _store(store, deadline_s) as client:
        if key:
            blocks = named.find(client, key, namespace_id)
            behind = named.behind(client, blocks)
            chosen = blocks | behind if with_children else blocks
            gone = sum(
                client.evict(where, [k for k, w in chosen.items() if w == where], only)
                for where in set(chosen.values())
            )
        else:
            gone = client.evict(namespace_id, None, only)
        left = client.stat().blocks
    print(f"{output.counted(gone, 'block')} evicted, {left:,} left in the store")
    if key and not gone:
        print(_why_kept(blocks, len(behind), with_children), file=sys.stderr)
        sys.exit(EXIT_WRONG)


def _why_kept(blocks: dict[bytes, bytes], behind: int, with_children: bool) -> str:
    if not behind or with_children:
        return "they are not on that tier, in use, or have no copy elsewhere"
    what = f"{next(iter(blocks)).hex()} has" if len(blocks) == 1 else "these have"
    return f"{what} {output.counted(behind, 'block')} behind; they go first: add --with-children"
