"""A daemon's start and end: settings, drain, health, metrics, what it loads."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from daemons import ROOT, STORE_SETTINGS, Daemon, chain, free_port, fresh_namespace, keys_of, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore import Client, PutOutcome, connect
from kvstore.config import DaemonConfig, build_config
from kvstore.errors import KVStoreError, Overloaded, Unavailable
from kvstore.server import daemon as daemon_module
from kvstore.store import Engine


class Hosted:
    """A daemon on a thread of this process, whose engine a test can reach."""

    def __init__(self, socket: Path, settings: dict[str, Any]) -> None:
        self.engine: Engine | None = None
        self.url = ""
        self.result: BaseException | None = None
        self._config = build_config(
            DaemonConfig, {}, {**STORE_SETTINGS, **settings, "server.listen": f"unix://{socket}"}
        )
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:
            self.result = e
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.daemon = daemon_module.Daemon(self._config)
        await self.daemon.run(self._on_ready)

    def _on_ready(self, url: str) -> None:
        self.url = url
        self._ready.set()

    def start(self) -> "Hosted":
        self._thread.start()
        self._ready.wait(20.0)
        assert self.url, self.result
        return self

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.daemon.stop)

    def join(self) -> None:
        self._thread.join(30.0)
        assert not self._thread.is_alive()


class Held:
    """Calls of the engine that say when they began, and go on when they are let."""

    def __init__(self) -> None:
        self.flushing, self.waiting, self.go = (threading.Event() for _ in range(3))

    def await_flush(self) -> None:
        assert self.flushing.wait(20.0)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held, flush, wait_for = Held(), Engine.flush, Engine.wait_for

    async def slow(self: Engine) -> None:
        held.flushing.set()
        while not held.go.is_set():
            await asyncio.sleep(0.005)
        await flush(self)

    async def waiting(self: Engine, *arguments: Any) -> Any:
        held.waiting.set()
        return await wait_for(self, *arguments)

    monkeypatch.setattr(Engine, "flush", slow)
    monkeypatch.setattr(Engine, "wait_for", waiting)
    return held


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def refuses(client: Client) -> bool:
    """Whether a new call gets no answer any more."""
    try:
        client.stat()
    except Unavailable:
        return True
    return False


def test_draining_finishes_what_is_in_flight_and_takes_nothing_new(
    tmp_path: Path, held: Held, pool: ThreadPoolExecutor
) -> None:
    hosted = Hosted(tmp_path / "kv.sock", {"dir": tmp_path / "store"}).start()
    with connect(hosted.url) as client, connect(hosted.url) as other:
        ns = client.open_namespace(fresh_namespace())
        blocks = chain(ns, 2)
        client.put(ns, blocks)
        pending = chain(ns, 1, seed=1)
        client.reserve(ns, [(b.key, b.parent) for b in pending])
        in_flight = pool.submit(client.flush)
        waiting = pool.submit(other.wait_for, ns, keys_of(pending), 60.0)
        held.await_flush()
        assert held.waiting.wait(20.0)
        hosted.stop()
        with pytest.raises(Unavailable):
            waiting.result(20.0)
        until(lambda: refuses(other))
        assert not in_flight.done()
        held.go.set()
        in_flight.result(20.0)
    hosted.join()
    assert hosted.result is None
    assert not (tmp_path / "kv.sock").exists()
    with connect(f"file://{tmp_path}/store") as client:
        ns = client.open_namespace(ns.namespace)
        assert client.match(ns, keys_of(blocks)).hit_blocks == 2


def test_a_second_signal_cuts_calls_off(
    tmp_path: Path, held: Held, pool: ThreadPoolExecutor
) -> None:
    hosted = Hosted(tmp_path / "kv.sock", {"dir": tmp_path / "store"}).start()
    with connect(hosted.url) as client:
        in_flight = pool.submit(client.flush)
        held.await_flush()
        hosted.stop()
        hosted.stop()
        with pytest.raises(Unavailable):
            in_flight.result(20.0)
        held.go.set()
    hosted.join()
    assert hosted.result is None


def test_a_call_whose_caller_left_runs_to_its_end(tmp_path: Path, held: Held) -> None:
    hosted = Hosted(tmp_path / "kv.sock", {"dir": tmp_path / "store"}).start()
    with connect(hosted.url) as client:
        client._client.deadline_s = 1.0
        with pytest.raises(Unavailable):
            client.flush()
    held.await_flush()
    hosted.stop()
    held.go.set()
    hosted.join()
    assert hosted.result is None


def test_calls_beyond_the_limit_are_refused(
    tmp_path: Path, held: Held, pool: ThreadPoolExecutor
) -> None:
    settings = {"dir": tmp_path / "store", "server.calls_max": 1}
    hosted = Hosted(tmp_path / "kv.sock", settings).start()
    with connect(hosted.url) as client:
        in_flight = pool.submit(client.flush)
        held.await_flush()
        with pytest.raises(Overloaded):
            client.stat()
        held.go.set()
        in_flight.result(20.0)
        client.stat()
    hosted.stop()
    hosted.join()


def test_an_unforeseen_failure_is_an_error_without_its_insides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Engine) -> None:
        raise ZeroDivisionError("the secret of the engine")

    hosted = Hosted(tmp_path / "kv.sock", {}).start()
    monkeypatch.setattr(Engine, "stat", broken)
    with connect(hosted.url) as client, pytest.raises(KVStoreError) as caught:
        client.stat()
    assert "its log has the reason" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "the secret of the engine" in caplog.text
    hosted.stop()
    hosted.join()


def test_health_follows_the_drain(tmp_path: Path, held: Held, pool: ThreadPoolExecutor) -> None:
    hosted = Hosted(tmp_path / "kv.sock", {"dir": tmp_path / "store"}).start()
    with connect(hosted.url) as client, grpc.insecure_channel(hosted.url) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        in_flight = pool.submit(client.flush)
        held.await_flush()
        hosted.stop()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        held.go.set()
        in_flight.result(20.0)
    hosted.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_in_order(tmp_path: Path, number: int) -> None:
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", tmp_path / "store", STORE_SETTINGS).start()
    with connect(daemon.url) as client:
        ns = client.open_namespace(fresh_namespace())
        blocks = chain(ns, 5)
        assert client.put(ns, blocks) == [PutOutcome.STORED] * 5
        daemon.signal(number)
        assert daemon.wait() == 0
    # What was accepted was written back on the way out.
    with connect(f"file://{tmp_path}/store") as client:
        ns = client.open_namespace(ns.namespace)
        assert client.match(ns, keys_of(blocks)).hit_blocks == 5


def test_the_effective_configuration_is_logged_once(tmp_path: Path) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text('[dram]\nbudget_bytes = "2MiB"\n[server]\ndrain_s_max = 7\n')
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", None, {"dram.budget_bytes": "3MiB"})
    daemon._command += ["--config", str(file)]
    assert daemon.start().terminate() == 0
    log = daemon.log.decode()
    assert log.count("effective configuration") == 1
    (line,) = [line for line in log.splitlines() if "effective configuration" in line]
    settings = json.loads(line[line.index("{") :])
    assert settings["dram"]["budget_bytes"] == 3 << 20
    assert settings["server"]["drain_s_max"] == 7
    assert f"serving unix://{tmp_path}/kv.sock" in log


def test_metrics_on_loopback(tmp_path: Path) -> None:
    port = free_port()
    settings = {**STORE_SETTINGS, "server.metrics_listen": f"127.0.0.1:{port}"}
    daemon = Daemon(f"unix://{tmp_path}/kv.sock", tmp_path / "store", settings).start()
    try:
        with connect(daemon.url) as client:
            ns = client.open_namespace(fresh_namespace())
            blocks = chain(ns, 3)
            client.put(ns, blocks)
            client.match(ns, [*keys_of(blocks), b"\1" * 32])
            client.put_handover(ns, "request", b"record")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        assert float(values['kvstore_lookup_blocks_total{found="hit_dram"}']) == 3
        assert float(values['kvstore_lookup_blocks_total{found="miss"}']) == 1
        assert float(values['kvstore_put_blocks_total{outcome="stored"}']) == 3
        assert float(values['kvstore_tier_objects{tier="dram"}']) == 3
        assert float(values["kvstore_windows_objects"]) == 1
        assert float(values["kvstore_windows_used_bytes"]) == 4096
        assert float(values["kvstore_windows_stored_total"]) == 1
        assert float(values['kvstored_call_seconds_count{method="BulkPut",result="ok"}']) == 1
        assert daemon.terminate() == 0
    finally:
        daemon.kill()


LOADED = "import sys; import {modules}; print(sorted({{n.split('.')[0] for n in sys.modules}}))"


def loaded_by(modules: str) -> set[str]:
    code = LOADED.format(modules=modules)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.replace("'", '"')))


def test_the_daemon_loads_no_torch_and_no_cupy() -> None:
    loaded = loaded_by("kvstore.cli, kvstore.server.daemon, kvstore.client.embedded")
    assert "grpc" in loaded
    assert not loaded & {"torch", "cupy", "safetensors", "model_adapter", "kernels"}


def test_importing_the_package_loads_next_to_nothing() -> None:
    assert not loaded_by("kvstore") & {"numpy", "grpc", "google", "lmdb", "pydantic", "torch"}


def test_importing_the_client_loads_neither_engine_nor_grpc() -> None:
    assert not loaded_by("kvstore.client") & {"grpc", "lmdb", "pydantic", "torch"}
