"""Play the turns over a source of blocks, and hold each answer against the reference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model_adapter.demo.reference import ProcessBlocks, WatchedBlocks
from model_adapter.demo.schedule import Turn
from model_adapter.model import Model
from model_adapter.session import (
    BlockSource,
    CachedSession,
    Generation,
    RequestReport,
    SnapshotOutcome,
)

OnTurn = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Played:
    """One turn of one pass.

    `equal`: the reference run gave the same tokens from the same bytes; None where the pass has no
    store to check.
    """

    turn: Turn
    token_ids: list[int]
    report: RequestReport
    equal: bool | None = None


def play_plain(
    model: Model, turns: Sequence[Turn], max_tokens: int, on_turn: OnTurn
) -> list[Played]:
    """Every turn without a store."""
    session = CachedSession(model)
    played = []
    for turn in turns:
        answer = session.generate(turn.prompt_ids, max_tokens)
        played.append(Played(turn, answer.token_ids, answer.report))
        on_turn()
    return played


def play_checked(
    model: Model,
    turns: Sequence[Turn],
    max_tokens: int,
    source: BlockSource,
    reference: ProcessBlocks,
    on_turn: OnTurn,
) -> list[Played]:
    """Every turn over `source`, each followed by its reference run."""
    watched, kept = WatchedBlocks(source), WatchedBlocks(reference)
    session, check = CachedSession(model, watched), CachedSession(model, kept)
    played = []
    for turn in turns:
        answer = session.generate(turn.prompt_ids, max_tokens)
        hit, resumed = answer.report.hit_tokens, answer.report.snapshot is SnapshotOutcome.HIT
        reference.hit_blocks = hit // source.layout.block_tokens
        reference.resume_at = hit if resumed else 0
        expected = check.generate(turn.prompt_ids, max_tokens)
        equal = _same(answer, expected) and watched.digests == kept.digests
        played.append(Played(turn, answer.token_ids, answer.report, equal))
        on_turn()
    return played


def _same(answer: Generation, expected: Generation) -> bool:
    a, e = answer.report, expected.report
    return answer.token_ids == expected.token_ids and (
        (a.hit_tokens, a.replayed_tokens, a.encoder_positions, a.decoder_positions)
        == (e.hit_tokens, e.replayed_tokens, e.encoder_positions, e.decoder_positions)
    )
