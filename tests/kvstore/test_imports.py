"""The arrows between rooms, read from the source of every module, lazy imports included."""

import ast
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvstore", "model_adapter", "kernels")
LEAVES = {"block", "prefix_hash", "namespace", "errors", "config", "clock", "metrics"}
"""Pure names and values. Leaves may know each other."""
SIDE_BY_SIDE = {"index", "lease", "eviction", "tiers"}
"""Rooms that know leaves and not one another."""

MAY_IMPORT = {
    **dict.fromkeys(LEAVES, LEAVES),
    **dict.fromkeys(SIDE_BY_SIDE, LEAVES),
    "windows": LEAVES | {"tiers"},
    "migration": LEAVES | SIDE_BY_SIDE,
    "store": LEAVES | SIDE_BY_SIDE | {"windows", "migration"},
    "server": LEAVES | SIDE_BY_SIDE | {"migration", "store", "v1"},
    "client": LEAVES | {"store", "server", "tiers", "v1"},
    "bench": LEAVES | {"eviction", "index", "client"},
    "cli": LEAVES | {"client", "server", "store", "bench"},
    "": LEAVES | {"client"},
    "__main__": {"cli"},
    "v1": set(),
    "testing": LEAVES | SIDE_BY_SIDE | {"windows", "migration", "store"},
}
"""By room of kvstore ("" is its front door): the other rooms that it may import."""
PROTOBUF_ROOMS = {"server", "client", "v1"}
NEVER_IN_KVSTORE = {"torch", "cupy", "model_adapter"}
CUPY_LATE = "kvstore.tiers.hbm.cupy_device"
"""Imports CuPy when a device is asked for; nobody imports the module before that."""
PUBLIC = {"", "errors"}
"""What model_adapter sees of kvstore: the front door and the errors."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Full names of everything that a module imports, wherever in it; `from a import b` gives
    `a.b` too, since b may be a module."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def room_of(name: str) -> str:
    """The room of kvstore that a full name lies in; names of the front door's own are ""."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


def edges(package: str):
    """(module, what it imports) over a package."""
    return chain.from_iterable(
        ((name_of(path), imported) for imported in imports_of(path)) for path in modules(package)
    )


def test_every_module_has_a_room():
    strangers = {
        name
        for name in map(name_of, modules("kvstore"))
        if name != "kvstore" and name.split(".")[1] not in MAY_IMPORT
    }
    assert not strangers, "say in MAY_IMPORT what these may import"


def test_rooms_of_kvstore_import_one_way():
    wrong = set()
    for module, imported in edges("kvstore"):
        if imported.split(".")[0] != "kvstore":
            continue
        here, there = room_of(module), room_of(imported)
        # `import kvstore.x` names the front door on its way to x
        if here != there and there not in MAY_IMPORT[here] and imported != "kvstore":
            wrong.add(f"{module} imports {imported}")
    assert not wrong


def test_kvstore_knows_neither_torch_nor_the_adapter():
    wrong = {(m, i) for m, i in edges("kvstore") if i.split(".")[0] in NEVER_IN_KVSTORE}
    assert wrong == {(CUPY_LATE, "cupy")}


def test_only_server_and_client_know_protobuf():
    wrong = {
        (module, imported)
        for module, imported in edges("kvstore")
        if imported.split(".")[0] in {"grpc", "google", "grpc_health", "grpc_reflection"}
        and room_of(module) not in PROTOBUF_ROOMS
    }
    assert not wrong


def test_kernels_import_nothing_of_ours():
    wrong = {
        (module, imported)
        for module, imported in edges("kernels")
        if imported.split(".")[0] in {"kvstore", "model_adapter"}
    }
    assert not wrong


def test_the_adapter_sees_the_front_door_and_the_kernels_only():
    wrong = {
        (module, imported)
        for module, imported in edges("model_adapter")
        if imported.split(".")[0] == "kvstore" and room_of(imported) not in PUBLIC
    }
    assert not wrong


@pytest.mark.parametrize("module", ["kvstore", "kvstore.server.daemon", "kvstore.store"])
def test_starting_loads_no_model(module):
    code = f"import sys, {module}; print(*{{m.split('.')[0] for m in sys.modules}})"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert not {"torch", "cupy", "model_adapter", "kernels"} & set(ran.stdout.split())


def test_the_walk_finds_imports_of_every_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    source = tmp_path / "kvstore" / "index" / "some.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "import a.b\nfrom c import d\nfrom . import e\nfrom ..store import f\n"
        "def g():\n    from kvstore import client\n"
    )
    assert imports_of(source) >= {
        "a.b",
        "c.d",
        "kvstore.index.e",
        "kvstore.store.f",
        "kvstore.client",
    }
