"""`kvstore bench replay`: a trace against policies in the simulator, or against a store."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvstore.bench import live, pictures
from kvstore.bench.cost import PRESETS, CostModel
from kvstore.bench.read import read
from kvstore.bench.report import attribution, live_figures, replay_figures, trace_figures
from kvstore.bench.show import curves_of, show, show_measured
from kvstore.bench.simulate import Replay
from kvstore.bench.sweep import CLASSICS, DEFAULT_SHARES, OPTIMUM, blocks_of, maker, sweep
from kvstore.bench.trace import Trace, head, with_one_offs
from kvstore.bench.weka import Users
from kvstore.client import connect
from kvstore.errors import InvalidRequest

_EXIT_WRONG = 1


class Preset(StrEnum):
    """Cost models by name."""

    H100 = "h100"
    GB300 = "gb300"


_ALL = (*CLASSICS, "gittins", OPTIMUM)


def replay(
    trace: Annotated[Path, typer.Argument(help="A file or folder, see above.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as lru, gittins+hints (told what comes next), optimum. Repeatable.",
            show_default="all",
        ),
    ] = None,
    capacity: Annotated[
        list[float] | None,
        typer.Option(
            help="Below 1: share of the unique blocks; else blocks. Repeatable.",
            show_default=", ".join(map(str, DEFAULT_SHARES)),
        ),
    ] = None,
    dram: Annotated[float, typer.Option(help="DRAM's share of the capacity.", min=0, max=1)] = 0,
    users: Annotated[int, typer.Option(help="weka: sessions at a time.", min=1)] = 50,
    think_max: Annotated[
        float, typer.Option(help="weka: longest idle seconds; 0: as recorded.")
    ] = 60,
    one_offs: Annotated[
        float, typer.Option(help="Share of prompts, mixed in, that nobody repeats.", min=0, max=0.9)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the sessions' order and the one-offs.")] = 0,
    cost: Annotated[Preset, typer.Option(help="Whose prefill the times come from.")] = (
        Preset.H100
    ),
    prefill: Annotated[float, typer.Option(help="Prefill tokens/s of your own; 0: --cost's.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    png: Annotated[Path | None, typer.Option(help="Folder for pictures.")] = None,
    requests: Annotated[int, typer.Option(help="Only the first so many; 0: all.", min=0)] = 0,
    store: Annotated[
        str,
        typer.Option(
            "--live", help="URL of a store to play against, with real bytes.", metavar="URL"
        ),
    ] = "",
    sessions: Annotated[int, typer.Option(help="Live: requests at a time.", min=1)] = 4,
    speedup: Annotated[
        float, typer.Option(help="Live: times pass so much faster; 0: nobody waits.", min=0)
    ] = 0,
) -> None:
    """Replay a request trace against eviction policies (no bytes, any capacity) or, with --live,
    against a running store with real bytes.

    Hit rates are of whole blocks' tokens. Times to first token come from the cost model; a live run
    adds what it measured. TRACE is one of (see docs/policies.md):

    \b
    mooncake  JSONL: timestamp (ms), input_length, hash_ids (512-token blocks,
              chained)
    weka      .tar.zst, directory or file of sessions with nested subagents and
              think times
    lmcache   JSONL or directory of it: timestamp (µs), input (text), session_id
    ragpulse  the directory with 0_trace.jsonl and its token-length tables
    generic   JSONL, in order of time; per line time_s and one of
              blocks (ids of whole blocks that name prefixes), tokens (ids), text;
              optional block_tokens (on the first line, default 128), session,
              prompt_tokens, answer_s, next (tool_call, user_turn or
              end_of_session)

    With --live, the simulator plays the same requests too, under the store's policy and at the
    capacity that the store turned out to have, for comparison.
    """
    if store and len(policy or ()) > 1:
        raise InvalidRequest(f"a store runs one policy, not {' and '.join(policy or ())}")
    model = PRESETS[cost.value]
    if prefill > 0:
        model = model.with_rate(prefill)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    out = _Out(model, as_json, png)
    with bar:
        loaded = _load(bar, trace, Users(users, think_max or None, seed=seed))
        if one_offs:
            loaded = with_one_offs(loaded, one_offs, seed)
        if requests:
            loaded = head(loaded, requests)
        if store:
            played = _play(bar, loaded, store, sessions, speedup, seed, (policy or [""])[0])
        else:
            sizes = list(capacity or DEFAULT_SHARES)
            done = _sweep(bar, loaded, list(policy or _ALL), sizes, dram)
    if not store:
        out.of_simulation(loaded, done)
    elif out.of_store(*played):
        raise typer.Exit(_EXIT_WRONG)


def _load(bar: Progress, path: Path, users: Users) -> Trace:
    task = bar.add_task(f"reading {path.name}", total=1.0)
    loaded = read(path, users, lambda share: bar.update(task, completed=share))
    bar.remove_task(task)
    return loaded


def _sweep(
    bar: Progress, trace: Trace, names: list[str], capacities: list[float], dram: float
) -> list[Replay]:
    for name in names:
        maker(name, trace)
    for one in capacities:
        blocks_of(one, trace)
    task = bar.add_task("", total=len(names) * len(capacities))

    def tell(what: str, runs: float) -> None:
        bar.update(task, description=what, completed=runs)

    return list(sweep(trace, names, capacities, dram, tell))


def _play(
    bar: Progress, trace: Trace, url: str, sessions: int, speedup: float, seed: int, policy: str
) -> tuple[live.LiveRun, str]:
    if policy:
        maker(policy, trace)
    task = bar.add_task(f"playing against {url}", total=1.0)
    with connect(url) as client:
        policy = live.policy_of(client, policy)
        run = live.play(
            client,
            trace,
            sessions,
            speedup,
            seed,
            lambda share: bar.update(task, completed=share),
        )
    return run, policy


@dataclass(frozen=True, slots=True)
class _Out:
    """Where results go."""

    cost: CostModel
    as_json: bool
    png: Path | None

    def of_simulation(self, trace: Trace, done: list[Replay]) -> None:
        figures = [replay_figures(r, self.cost) for r in done]
        if self.as_json:
            self._json(trace, figures, done)
        else:
            show(trace, figures)
        if self.png:
            pictures.hit_rates(trace.name, curves_of(figures), self.png / "hit_rates.png")
            first = [r for r in done if r.capacity == done[0].capacity]
            self._pictures(done[-1], first)

    def of_store(self, run: live.LiveRun, policy: str) -> bool:
        """Whether a block came back with other bytes than were put."""
        figures = [live_figures(run, f"{policy or 'store'}, live", self.cost)]
        done = [run.as_replay(f"{policy or 'store'}, live")]
        if policy:
            done.append(run.simulated(policy))
            figures.append(replay_figures(done[1], self.cost))
        if self.as_json:
            self._json(run.trace, figures, done)
        else:
            show(run.trace, figures)
            show_measured(figures[0]["measured"])
        if self.png:
            self._pictures(done[0], done)
        return run.wrong_blocks > 0

    def _json(self, trace: Trace, figures: list[dict[str, Any]], done: list[Replay]) -> None:
        times = [attribution(r) for r in done]
        print(json.dumps({"trace": trace_figures(trace), "replays": figures, "over_time": times}))

    def _pictures(self, one: Replay, several: list[Replay]) -> None:
        assert self.png is not None
        pictures.tiers_over_time(one, self.png / "tiers_over_time.png")
        pictures.ttft(several, self.cost, self.png / "ttft.png")
