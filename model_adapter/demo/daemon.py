"""A `kvstored` of our own: started as a process, waited for, stopped by its id."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import kvstore
from kvstore.errors import KVStoreError

START_S_MAX = 30.0
STOP_S_MAX = 30.0
FREE_FLOOR_BYTES = 64 << 20
"""Left free on the disk: a passing visitor needs less of a margin than a daemon that stays."""


class Daemon:
    """`kvstored` over `directory`, on a unix socket beside it; a context manager. `hbm_bytes`: of
    an HBM tier on the device `hbm_device` (see `hbm.device` of the settings); 0 for none.

    Raises `RuntimeError` with the daemon's last words where it does not come up within
    `START_S_MAX`.
    """

    def __init__(
        self,
        directory: Path,
        dram_bytes: int,
        ssd_bytes: int,
        hbm_bytes: int = 0,
        hbm_device: str = "simulated",
    ) -> None:
        self._store = directory / "store"
        self._store.mkdir(parents=True, exist_ok=True)
        self._log = directory / "kvstored.log"
        self.url = f"unix://{directory / 'kv.sock'}"
        self._budgets = (dram_bytes, ssd_bytes)
        self._tiers = ["--tiers", "dram,ssd"]
        if hbm_bytes:
            self._tiers = ["--tiers", "hbm,dram,ssd", "--hbm", str(hbm_bytes)]
            self._tiers += ["--set", f"hbm.device={hbm_device}"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Daemon":
        dram, ssd = self._budgets
        command = [sys.executable, "-m", "kvstore.cli", "serve", "--dir", str(self._store)]
        command += ["--listen", self.url, "--dram", str(dram), "--ssd", str(ssd)]
        command += self._tiers
        command += ["--set", f"ssd.free_floor_bytes={FREE_FLOOR_BYTES}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._await_ready()
        return self

    def _await_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with kvstore.connect(self.url, deadline_s=1.0) as client:
                    client.stat()
                return
            except KVStoreError:
                time.sleep(0.1)
        self.stop()
        words = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RuntimeError(f"kvstored did not come up; its log {self._log} ends:\n{words}")

    @property
    def pid(self) -> int:
        """Process id. Raises `RuntimeError` where it does not run."""
        if self._process is None:
            raise RuntimeError("the daemon does not run")
        return self._process.pid

    def stop(self) -> None:
        """Ask it to drain and end; kill it where it does not within `STOP_S_MAX`."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
