"""A request that nobody wants any more ends soon, and what it computed is kept."""

import numpy as np
import pytest
import tiny_checkpoint as tiny
from tiny_checkpoint import BLOCK_TOKENS

from model_adapter.decoding import SamplingParams, SpeculationStats, generate

IDS = tiny.prompt(150)


def test_within_the_prefill_it_ends_behind_the_chunk(tmp_path):
    asked = iter([False, True])
    with tiny.store(tmp_path) as client:
        session = tiny.session(client, chunk_tokens=BLOCK_TOKENS)
        answer = session.generate(IDS, 5, stopped=lambda: next(asked))
        assert answer.token_ids == []
        assert answer.report.generated_tokens == 0
        assert answer.report.stored_blocks == 2
        again = session.generate(IDS, 5)
    assert again.report.hit_tokens == 2 * BLOCK_TOKENS


def test_within_the_answer_it_ends_behind_the_token(tmp_path):
    seen: list[int] = []
    with tiny.store(tmp_path) as client:
        session = tiny.session(client)
        answer = session.generate(IDS, 40, on_token=seen.append, stopped=lambda: len(seen) == 20)
        assert answer.token_ids == seen == tiny.plain(IDS, 20)
        # 150 + 19 positions
        assert answer.report.stored_blocks == 5
        longer = np.concatenate([IDS, seen, tiny.prompt(9)])
        assert session.generate(longer, 1).report.hit_tokens == len(IDS) + 19
        again = tiny.session(client, snapshots=False).generate(longer, 1)
        assert again.report.hit_tokens == 5 * BLOCK_TOKENS


class RightGuesses:
    """Drafts that know what the answer will be."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.behind = 0

    def observer(self, stage, layer, tensor):
        pass

    def take_up(self, end, rejected=0):
        assert rejected == 0
        self.behind = end - len(IDS) + 1

    def propose(self, token, limit, banned):
        return self.tokens[self.behind : self.behind + min(limit, 4)]

    def truncate(self, end):
        self.behind = end - len(IDS) + 1


@pytest.mark.parametrize("length", [9, 10, 11, 12, 13])
def test_accepted_drafts_that_were_not_asked_for_are_not_stored(tmp_path, length):
    drafts = RightGuesses(tiny.plain(IDS, 20))
    stats = SpeculationStats()

    def decode(model, cache, logits, max_tokens, stop_ids):
        params = SamplingParams(max_tokens)
        yield from generate(model, cache, logits, params, stop_ids, drafts, stats=stats)

    seen: list[int] = []
    with tiny.store(tmp_path) as client:
        answer = tiny.session(client).generate(
            IDS,
            20,
            on_token=seen.append,
            decode=decode,
            stopped=lambda: len(seen) == length,
        )
    assert answer.token_ids == drafts.tokens[:length]
    assert stats.accepted == 4 * stats.rounds > 0
    assert answer.report.stored_blocks == (len(IDS) + length - 1) // BLOCK_TOKENS
