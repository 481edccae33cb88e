"""Every door to a store and every way for bytes, for tests that say the same behind each of them.

A door is a kind and a flavour. The kind: `file`, `unix` or `dns`, with what is asked of the URL
behind a `?`. The flavour: `sync` or `async`.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from daemons import Daemon, Door, free_port


def doors_of(kinds: Iterable[str]) -> list[tuple[str, str]]:
    """Each kind in both flavours."""
    return [(kind, flavour) for kind in kinds for flavour in ("sync", "async")]


@contextmanager
def serving(folder: Path, settings: dict[str, Any], on_disk: bool) -> Iterator[dict[str, str]]:
    """A daemon on a socket and one on a port: their URLs, as `unix` and `dns`. `on_disk`: each with
    a directory of its own in `folder`."""
    listens = {"unix": f"unix://{folder}/kv.sock", "dns": f"tcp://127.0.0.1:{free_port()}"}
    with ExitStack() as stack:
        urls = {}
        for kind, listen in listens.items():
            daemon = Daemon(listen, folder / kind if on_disk else None, settings)
            urls[kind] = stack.enter_context(daemon).url
        yield urls


@contextmanager
def opened(
    door: tuple[str, str], urls: dict[str, str], folder: Path, settings: dict[str, Any]
) -> Iterator[Door]:
    """A client behind `door`. `urls`: as `serving` has them; a `file` is made in `folder`, with
    `settings`, which a daemon has already."""
    kind, flavour = door
    name, query, data = kind.partition("?")
    url = urls.get(name, f"file://{folder}/store")
    client = Door(url + query + data, flavour == "async", **(settings if name == "file" else {}))
    try:
        yield client
    finally:
        client.close()
