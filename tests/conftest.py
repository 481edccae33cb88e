import os

import pytest
from hypothesis import HealthCheck, Phase, settings

SEED_DEFAULT = 20260919

# The order of a sum depends on the SIMD width, and a last bit can turn a code: the widest that most
# machines have keeps what the tests see the same on them. Read when torch is first imported.
for _name, _value in (("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2")):
    os.environ.setdefault(_name, _value)

_slow = (HealthCheck.too_slow, HealthCheck.data_too_large)
_phases = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile(
    "quick", deadline=None, derandomize=True, phases=_phases, suppress_health_check=_slow
)
settings.register_profile(
    "long", deadline=None, max_examples=2000, phases=_phases, suppress_health_check=_slow
)


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=SEED_DEFAULT, help="seed of every random test")
    parser.addoption("--long", action="store_true", help="the long form of randomised tests")


def pytest_configure(config):
    long = config.getoption("--long")
    settings.load_profile("long" if long else "quick")
    if long and getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = config.getoption("--seed")


def pytest_report_header(config):
    return f"seed: {config.getoption('--seed')} (repeat with --seed N)"


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="the long form runs with --long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def seed(request):
    """The seed of this run; `--seed N` sets it."""
    return request.config.getoption("--seed")


@pytest.fixture
def long(request):
    """Whether the long form of a randomised test is asked for."""
    return request.config.getoption("--long")
