"""What is promised in which dtype.

float32: two implementations differ by the order of sums only. In bfloat16 the quantisers amplify
every rounding, so that only blocks alone and short runs can be compared; selections may differ
where scores nearly tie.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tolerances:
    """`block`, `end_to_end`: relative errors. `exact`: share of unequal integers, None where they
    may differ. `runs`: pattern of the keys that `end_to_end` holds for."""

    block: float
    end_to_end: float
    exact: float | None
    runs: str

    def for_key(self, key: str) -> float | None:
        """Tolerance of a key end to end."""
        return self.end_to_end if re.match(self.runs, key) else None

    def exact_for_key(self, key: str) -> float | None:
        """Share of unequal integers that a key may have end to end."""
        return self.exact if re.match(self.runs, key) else None


TOLERANCES = {
    "float32": Tolerances(1e-5, 1e-4, 0.0, ""),
    "bfloat16": Tolerances(2e-2, 5e-2, None, r"(short|mid|dspark)\."),
}
