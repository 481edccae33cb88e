"""Prefill on one node, decode on another, the store between them (ds41f §5).

The prefill side announces the prompt, leaves its blocks in the store as chunks finish, and then the
hand-over record: the state behind the prompt, the first token and how tokens are drawn. The decode
side, told the request's name alone, fetches blocks while the prefill still runs, takes the record
up and goes on; its tokens are those of one process. `docs/handover.md` has the bytes and what
happens when either side or the store dies.
"""

from model_adapter.handover.decode_side import Received, Waiting, announced, continued, receive
from model_adapter.handover.prefill_side import HandedOver, hand_over
from model_adapter.handover.record import Announcement, HandoverRecord, Sampling

__all__ = [
    "Announcement",
    "HandedOver",
    "HandoverRecord",
    "Received",
    "Sampling",
    "Waiting",
    "announced",
    "continued",
    "hand_over",
    "receive",
]
