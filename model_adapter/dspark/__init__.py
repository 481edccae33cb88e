"""DSpark: three draft layers that guess the next tokens (ds41f §2 DSpark, report §2.4.3).

The draft layers look at what the backbone's last layers made of the positions before (features),
and at the token just sampled; one pass over a block of placeholders gives a guess for each of the
next positions, a Markov head ties each guess to the one before it, and a confidence head says how
likely each is to stand. `Drafter` is one per model, `SequenceDrafts` one per sequence;
`model_adapter.decoding` verifies what they propose.
"""

from model_adapter.dspark.drafter import Drafter
from model_adapter.dspark.features import FeatureTap
from model_adapter.dspark.heads import Draft
from model_adapter.dspark.sequence import VERIFY_THRESHOLD_DEFAULT, SequenceDrafts, verify_count
from model_adapter.dspark.windows import DraftWindows

__all__ = [
    "VERIFY_THRESHOLD_DEFAULT",
    "Draft",
    "DraftWindows",
    "Drafter",
    "FeatureTap",
    "SequenceDrafts",
    "verify_count",
]
