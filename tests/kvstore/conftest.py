import pytest
from store_harness import HandDrivenStore, store_config
from tiny_blocks import NS


@pytest.fixture
def store():
    """A core driven by hand, with room for everything."""
    return HandDrivenStore(store_config())


@pytest.fixture
def ns(store):
    """Id of the tiny namespace, open in `store`."""
    return store.core.open_namespace(NS)
