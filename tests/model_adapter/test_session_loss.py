"""A store that is lost at any moment, or that lost a byte, costs a request its hit and no more."""

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import tiny_checkpoint as tiny
from tiny_checkpoint import BLOCK_TOKENS

import kvstore
from kvstore.errors import KVStoreError, LeaseExpired, Unavailable
from model_adapter.demo.daemon import Daemon
from model_adapter.session import CachedSession, PrefixOutcome, StoreBlocks

TOKENS = 6
IDS = tiny.prompt(150)


class FlakyClient:
    """Passes calls on to a client until the `nth` one of `method`, which fails; so do all later
    ones, of any kind, as with a daemon that is gone."""

    def __init__(self, client, method: str, nth: int, error: KVStoreError) -> None:
        self._client, self._method, self._left, self._error = client, method, nth, error
        self.calls_after_loss = -1

    def _meet(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
        if self._left <= 0:
            self.calls_after_loss += 1
            raise self._error

    def __getattr__(self, method: str):
        def call(*args, **named):
            self._meet(method)
            return getattr(self._client, method)(*args, **named)

        return call

    def acquire(self, *args):
        self._meet("acquire")
        return FlakyLease(self._client.acquire(*args), self)


class FlakyLease:
    """Passes all on but its end, which is a call of the client too."""

    def __init__(self, lease, client: FlakyClient) -> None:
        self._lease, self._client = lease, client

    def __getattr__(self, name: str):
        return getattr(self._lease, name)

    def __enter__(self):
        return self._lease.__enter__()

    def __exit__(self, *error):
        self._lease.__exit__(*error)
        if error[0] is None:
            self._client._meet("release")


LOSSES = [
    # the call that fails, blocks that were in the cache by then
    ("open_namespace", 1, 0),
    ("match", 1, 0),
    ("acquire", 1, 0),
    ("read", 1, 0),
    ("read", 2, 1),
    ("read", 4, 3),
    ("release", 1, 4),
]


@pytest.mark.parametrize(("method", "nth", "blocks"), LOSSES)
@pytest.mark.parametrize("error", [Unavailable("gone"), LeaseExpired("too late")])
def test_loss_while_fetching_is_a_shorter_hit(tmp_path, caplog, method, nth, blocks, error):
    with tiny.store(tmp_path) as client:
        tiny.session(client).generate(IDS, 1)
        flaky = FlakyClient(client, method, nth, error)
        source = StoreBlocks(flaky, tiny.namespace(), batch_bytes_max=1)
        with caplog.at_level(logging.WARNING):
            answer = CachedSession(tiny.model(), source).generate(IDS, TOKENS)
    report = answer.report
    assert report.hit_tokens == blocks * BLOCK_TOKENS
    if blocks:
        assert report.outcome is PrefixOutcome.HIT
        assert answer.token_ids == tiny.replayed(IDS, tiny.rows_of(IDS)[:blocks], TOKENS)
    else:
        assert report.outcome is PrefixOutcome.LOST
        assert answer.token_ids == tiny.plain(IDS, TOKENS)
    assert str(error) in report.store_error
    assert "going on without the store" in caplog.text
    # one deadline is enough: nothing else is asked of it in this request
    assert flaky.calls_after_loss == 0


def test_an_outage_is_one_line_however_many_requests_it_lasts(tmp_path, caplog):
    with tiny.store(tmp_path) as client:
        flaky = FlakyClient(client, "match", 1, Unavailable("gone"))
        source = StoreBlocks(flaky, tiny.namespace())
        session = CachedSession(tiny.model(), source)
        with caplog.at_level(logging.WARNING):
            for left, answers in ((1, 2), (99, 2), (1, 1)):
                # gone, back, gone again
                flaky._left = left
                for _ in range(answers):
                    session.generate(IDS, 1)
    without, back = "going on without the store", "the store answers again"
    lines = [without if without in m else m for m in caplog.messages]
    assert lines == [without, back, without]


@pytest.mark.parametrize("nth", [1, 3])
def test_loss_while_storing_keeps_what_was_stored(tmp_path, nth):
    with tiny.store(tmp_path) as client:
        flaky = FlakyClient(client, "put", nth, Unavailable("gone"))
        source = StoreBlocks(flaky, tiny.namespace(), batch_bytes_max=1)
        answer = CachedSession(tiny.model(), source).generate(IDS, TOKENS)
        assert answer.token_ids == tiny.plain(IDS, TOKENS)
        assert answer.report.stored_blocks == nth - 1
        assert "gone" in answer.report.store_error
        assert flaky.calls_after_loss == 0
        again = tiny.session(client).generate(IDS, 1).report
    assert again.hit_tokens == (nth - 1) * BLOCK_TOKENS


def flip_a_byte(directory: Path, needle: bytes) -> None:
    """Change the disk's copy of `needle`, which has to be there once."""
    found = 0
    for path in directory.rglob("*.seg"):
        at = path.read_bytes().find(needle)
        if at >= 0:
            found += 1
            with path.open("r+b") as file:
                file.seek(at + len(needle) // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
    assert found == 1


def test_a_corrupt_block_is_a_shorter_hit_and_is_stored_anew(tmp_path):
    blocks = tiny.rows_of(IDS)
    with tiny.store(tmp_path) as client:
        tiny.session(client).generate(IDS, 1)
    flip_a_byte(tmp_path, blocks[2][4].tobytes())
    with tiny.store(tmp_path) as client:
        answer = tiny.session(client).generate(IDS, TOKENS)
        assert answer.report.hit_tokens == 2 * BLOCK_TOKENS
        assert answer.report.store_error is None
        assert answer.token_ids == tiny.replayed(IDS, blocks[:2], TOKENS)
        assert client.stat().counters["corrupt_ssd_blocks"] == 1
        again = tiny.session(client).generate(IDS, 1).report
        assert again.hit_tokens == 4 * BLOCK_TOKENS


@pytest.fixture
def daemon(tmp_path):
    with Daemon(tmp_path, 4 << 20, 256 << 20) as running:
        yield running


def kill(daemon: Daemon) -> None:
    os.kill(daemon.pid, signal.SIGKILL)
    daemon.stop()


def until_found(session: CachedSession):
    """The first answer that hits: a client tries to connect anew at growing intervals."""
    deadline = time.monotonic() + 20
    while True:
        answer = session.generate(IDS, TOKENS)
        if answer.report.hit_tokens or time.monotonic() > deadline:
            return answer


def test_a_daemon_killed_between_and_within_requests(tmp_path, daemon):
    class KilledAfterFirstRead(StoreBlocks):
        def load(self, found, blocks, cache):
            real_load_block = cache.load_block

            def load_block(i, *rest):
                real_load_block(i, *rest)
                kill(daemon)

            cache.load_block = load_block
            return super().load(found, blocks, cache)

    rows = tiny.rows_of(IDS)
    with kvstore.connect(daemon.url, deadline_s=5.0) as client:
        session = tiny.session(client)
        session.generate(IDS, 1)
        client.flush()
        warm = session.generate(IDS, TOKENS)
        assert warm.report.hit_blocks == {kvstore.Tier.DRAM: 4}
        assert warm.token_ids == tiny.replayed(IDS, rows[:4], TOKENS)

        source = KilledAfterFirstRead(client, tiny.namespace(), batch_bytes_max=1)
        killed = CachedSession(tiny.model(), source).generate(IDS, TOKENS)
        assert killed.report.hit_tokens == BLOCK_TOKENS
        assert killed.token_ids == tiny.replayed(IDS, rows[:1], TOKENS)
        assert killed.report.store_error

        gone = session.generate(IDS, TOKENS)
        assert gone.report.outcome is PrefixOutcome.LOST
        assert gone.token_ids == tiny.plain(IDS, TOKENS)

        with Daemon(tmp_path, 4 << 20, 256 << 20):
            back = until_found(session)
        assert back.report.hit_blocks == {kvstore.Tier.SSD: 4}
        assert back.token_ids == warm.token_ids
