"""This store with the peers' sizes, one block of one section per object."""

import sys
import tempfile
from pathlib import Path

import timing

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvstore
from benchmarks.dataplane.daemon import daemon, free_port
from kvstore import BlockPut, Layout, Namespace, SectionSpec


def rows(name: str, url: str) -> list[dict[str, object]]:
    """A lease per object is held, as a reader of a prefix holds one."""
    with kvstore.connect(url) as client:
        namespaces, leases = {}, {}
        for size in timing.OBJECT_BYTES:
            layout = Layout((SectionSpec(0, "main", 1, size // 64),), block_tokens=64)
            namespaces[size] = client.open_namespace(Namespace(f"peers-{size}", "1", layout))

        def put(key: str, value: bytes) -> None:
            ns = namespaces[len(value)]
            (digest,) = ns.block_keys(key.encode().ljust(256, b"\0"))
            client.put(ns, [BlockPut(digest, ns.id, [value])])
            leases[key] = client.acquire(ns, [digest], ttl_s=3600)

        def get(key: str) -> memoryview:
            lease = leases[key]
            return client.read(lease, lease.keys)[0].sections[0]

        return timing.rows(name, put, get)


def main() -> None:
    result = []
    with (
        tempfile.TemporaryDirectory() as folder,
        daemon(f"unix://{folder}/kv.sock", "1GiB") as unix,
        daemon(f"tcp://127.0.0.1:{free_port()}", "1GiB") as tcp,
    ):
        for name, url in (
            ("kvstore local", f"{unix}?data=shared"),
            ("kvstore unix port", f"{unix}?data=port"),
            ("kvstore tcp port", f"{tcp}?data=port"),
        ):
            result += rows(name, url)
    timing.tell(result)


if __name__ == "__main__":
    sys.exit(main())
