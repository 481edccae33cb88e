"""Many replays of one trace: policies × capacities, and the optimum beside them."""

from collections.abc import Callable, Iterable, Iterator

from kvstore.bench.belady import Belady
from kvstore.bench.simulate import PolicyMaker, Replay, simulate
from kvstore.bench.trace import Trace
from kvstore.errors import InvalidRequest
from kvstore.eviction import POLICIES

OPTIMUM = "optimum"
HINTED = "+hints"
"""Behind a policy's name: it is told at the end of every answer what comes next."""
CLASSICS = ("lru", "sieve", "s3_fifo", "arc", "w_tinylfu")
DEFAULT_SHARES = (0.01, 0.02, 0.05, 0.1, 0.25)


def maker(name: str, trace: Trace) -> tuple[PolicyMaker, bool]:
    """How to make the policy of that name, and whether it gets hints."""
    plain = name.removesuffix(HINTED)
    if plain == OPTIMUM:
        return (lambda surroundings: Belady(trace)), False
    if plain not in POLICIES:
        known = ", ".join([*sorted(POLICIES), OPTIMUM])
        raise InvalidRequest(f"there is no policy {name!r}; known: {known}, each with '{HINTED}'")
    return POLICIES[plain], name != plain


def blocks_of(capacity: float, trace: Trace) -> int:
    """A capacity in blocks from a share of the unique blocks (below 1), or from blocks."""
    if capacity <= 0:
        raise InvalidRequest(f"the capacity {capacity} is not above 0")
    return max(1, int(capacity * trace.unique)) if capacity < 1 else int(capacity)


def sweep(
    trace: Trace,
    policies: Iterable[str],
    capacities: Iterable[float],
    dram: float = 0.0,
    progress: Callable[[str, float], None] = lambda what, runs: None,
) -> Iterator[Replay]:
    """Every policy at every capacity, in this order. `dram`: DRAM's share of the capacity.
    `progress`: told what runs, and how many runs are done."""
    sizes = [blocks_of(c, trace) for c in capacities]
    runs = 0
    for name in policies:
        make, hints = maker(name, trace)
        for size in sizes:
            what = f"{name} at {size:,} blocks"

            def tell(share: float, what: str = what, runs: int = runs) -> None:
                progress(what, runs + share)

            yield simulate(
                trace,
                make,
                size,
                name=name,
                dram_capacity=int(size * dram) if name != OPTIMUM else 0,
                hints=hints,
                progress=tell,
            )
            runs += 1
