"""The README's example runs as printed, and its links lead somewhere."""

import re
from pathlib import Path

import kvstore

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path, monkeypatch):
    connect = kvstore.connect
    monkeypatch.setattr(
        kvstore,
        "connect",
        lambda url: connect(f"file://{tmp_path}/kv", **{"dram.budget_bytes": "64MiB"}),
    )
    examples = re.findall(r"```python\n(.*?)```", README, re.S)
    # another one talks to the endpoint, with a library that is not ours
    (example,) = (code for code in examples if "import kvstore\n" in code)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["found"].hit_blocks == 3


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
