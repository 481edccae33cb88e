"""The demo itself: one checkpoint, one schedule of turns, three passes."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress

import kvstore
from model_adapter.demo.conversations import load_conversations
from model_adapter.demo.daemon import Daemon
from model_adapter.demo.play import Played, play_checked, play_plain
from model_adapter.demo.reference import ProcessBlocks
from model_adapter.demo.results import DemoResults
from model_adapter.demo.schedule import schedule
from model_adapter.devices import device_of
from model_adapter.make_checkpoint import make_checkpoint
from model_adapter.model import Model
from model_adapter.session import CachedSession, StoreBlocks, namespace_of
from model_adapter.tokenizer import load_tokenizer

DRAM_BYTES = 64 << 20
SSD_BYTES = 256 << 20
HBM_BYTES = 32 << 20
WARM_UP_TOKENS = 300
DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What is played: how many sessions, turns of each and tokens per answer; `seed` is the
    checkpoint's. `hbm_device`: of an HBM tier for the store, `simulated` or `cupy`; None for no
    such tier. `device`: where the model computes."""

    preset: str
    seed: int
    sessions: int
    turns: int
    max_tokens: int
    hbm_device: str | None = None
    device: str = "cpu"


class Demo:
    """The three passes. `directory`: for the checkpoint, the store and the daemon's socket.

    Raises `InputError` for a device that can't be had.
    """

    def __init__(self, directory: Path, settings: Settings, progress: Progress) -> None:
        device = device_of(settings.device)
        self._start = time.perf_counter()
        self._directory = directory
        self._settings = settings
        self._progress = progress
        checkpoint = directory / "checkpoint"
        make_checkpoint(settings.preset, settings.seed, checkpoint)
        self._model = Model.load(checkpoint, dtype=torch.float32, device=device)
        conversations = load_conversations()[: settings.sessions]
        self._hbm = ""
        self._turns = schedule(conversations, load_tokenizer(checkpoint), settings.turns)
        self._namespace = namespace_of(self._model, checkpoint)

    def run(self) -> DemoResults:
        """Play all three passes; the daemon is stopped and started again before the last."""
        self._warm_up()
        plain = self._plain()
        reference = ProcessBlocks(self._namespace.layout)
        empty, _ = self._stored("2/3 empty store", reference)
        warm, lookups = self._stored("3/3 warm store, daemon restarted", reference)
        return DemoResults(
            preset=self._settings.preset,
            layout=self._namespace.layout,
            plain=plain,
            empty=empty,
            warm=warm,
            lookup_blocks=lookups,
            seconds=time.perf_counter() - self._start,
            hbm=self._hbm,
        )

    def _warm_up(self) -> None:
        """Weights are read at first use; that is not to be the first turn's cost."""
        ids = self._turns[0].prompt_ids[:WARM_UP_TOKENS]
        CachedSession(self._model).generate(ids, 2)

    def _plain(self) -> list[Played]:
        task = self._progress.add_task("1/3 no store", total=len(self._turns))
        return play_plain(
            self._model,
            self._turns,
            self._settings.max_tokens,
            lambda: self._progress.advance(task),
        )

    def _stored(self, name: str, reference: ProcessBlocks) -> tuple[list[Played], dict[str, int]]:
        task = self._progress.add_task(name, total=len(self._turns))
        device = self._settings.hbm_device
        hbm_bytes = HBM_BYTES if device else 0
        with (
            Daemon(self._directory, DRAM_BYTES, SSD_BYTES, hbm_bytes, device or "") as daemon,
            kvstore.connect(daemon.url, deadline_s=DEADLINE_S) as client,
        ):
            if device:
                client.open_hbm()
                self._hbm = "; ".join(client.stat().notes)
            played = play_checked(
                self._model,
                self._turns,
                self._settings.max_tokens,
                StoreBlocks(client, self._namespace),
                reference,
                lambda: self._progress.advance(task),
            )
            client.flush()
            return played, client.stat().lookup_blocks
