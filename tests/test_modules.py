"""The tests' modules share one `sys.path`, so that a name belongs to one of them."""

from collections import Counter
from pathlib import Path


def test_every_module_of_the_tests_has_a_name_of_its_own():
    paths = Path(__file__).parent.rglob("*.py")
    # pytest loads these by their paths
    names = Counter(p.stem for p in paths if p.name not in ("conftest.py", "__init__.py"))
    assert [name for name, n in names.items() if n > 1] == []
