"""Which positions go through which half of the network (ds41f §5).

On every prefill in `bounded` mode only the last W prompt positions go through the decoder; a prefix
hit whose windows are gone runs the last W cached positions through the encoder again. In `exact`
mode every position that is run at all goes through every layer.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from model_adapter.errors import InputError

Mode = Literal["bounded", "exact"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Positions [start, stop) run, global rows written from `write_from` on, the decoder from
    `decoder_from` on; `restart_decoder`: window keys before that are invisible there."""

    start: int
    stop: int
    write_from: int
    decoder_from: int
    restart_decoder: bool

    @property
    def replayed(self) -> int:
        """Positions run again whose global rows were there."""
        return max(self.write_from - self.start, 0)


def plan_continue(mode: Mode, length: int, new_tokens: int, window: int) -> Plan:
    """Go on behind `length` positions whose windows are there."""
    stop = length + new_tokens
    if _is_bounded(mode) and new_tokens >= window:
        return Plan(length, stop, length, stop - window, True)
    return Plan(length, stop, length, length, False)


def plan_resume(mode: Mode, hit_tokens: int, prompt_tokens: int, window: int) -> Plan:
    """Take up a hit of `hit_tokens` whose windows are gone: encoder bounded replay.

    Raises `InputError` where the hit is no longer than the window or leaves nothing to compute.
    """
    if not window < hit_tokens < prompt_tokens:
        raise InputError(
            f"a hit of {hit_tokens} tokens can't be resumed: it must be longer than the window "
            f"({window}) and shorter than the prompt ({prompt_tokens}); see Model.usable_hit_tokens"
        )
    start = hit_tokens - window
    decoder_from = prompt_tokens - window if _is_bounded(mode) else start
    return Plan(start, prompt_tokens, hit_tokens, decoder_from, True)


def _is_bounded(mode: Mode) -> bool:
    if mode not in get_args(Mode):
        raise InputError(f"mode {mode!r} is unknown; use 'bounded' or 'exact'")
    return mode == "bounded"
