import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard

from kvstore.bench.read import read
from kvstore.bench.weka import Users
from kvstore.errors import InvalidRequest
from kvstore.eviction import Outlook

TRACES = Path(__file__).parent / "traces"


def jsonl(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check(trace):
    """What must hold of every trace."""
    assert trace.start[0] == 0
    assert trace.start[-1] == trace.accesses
    assert (np.diff(trace.time_s) >= 0).all()
    assert (trace.parent < np.arange(trace.unique)).all()
    for r in range(trace.requests):
        chain = trace.chain(r)
        assert trace.parent[chain].tolist() == [-1, *chain[:-1].tolist()][: len(chain)]
    assert set(trace.blocks.tolist()) == set(range(trace.unique))


def test_mooncake():
    trace = read(TRACES / "mooncake.jsonl")
    check(trace)
    lines = [json.loads(x) for x in (TRACES / "mooncake.jsonl").read_text().splitlines()]
    assert trace.block_tokens == 512
    assert trace.requests == len(lines)
    assert trace.accesses == sum(len(x["hash_ids"]) for x in lines)
    assert trace.unique == len({i for x in lines for i in x["hash_ids"]})
    assert trace.tokens.tolist() == [x["input_length"] for x in lines]
    assert trace.time_s[-1] == lines[-1]["timestamp"] / 1000


def test_lmcache_text_in_blocks_of_128_pseudo_tokens():
    trace = read(TRACES / "lmcache")
    check(trace)
    prompts = [
        json.loads(x)["input"].encode()
        for x in (TRACES / "lmcache/session.jsonl").read_text().splitlines()
    ]
    assert np.diff(trace.start).tolist() == [len(p) // 512 for p in prompts]
    assert trace.unique == len({p[: 512 * (i + 1)] for p in prompts for i in range(len(p) // 512)})
    assert trace.unique < trace.accesses


def weka(name, requests, **more):
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests, **more}


def call(at, ids, api=1.0, stop="tool_use", tokens=None, kind="n"):
    ids = list(ids)
    return {
        "t": at,
        "type": kind,
        "in": tokens or 64 * len(ids),
        "out": 1,
        "hash_ids": ids,
        "api_time": api,
        "stop": stop,
    }


def archive(path, *sessions):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for i, session in enumerate(sessions):
            content = json.dumps(session).encode()
            member = tarfile.TarInfo(f"traces/{i}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    path.write_bytes(zstandard.compress(raw.getvalue()))
    return path


def test_weka_merges_blocks_and_plays_subagents_in_between(tmp_path):
    session = weka(
        "a",
        [
            call(0.0, range(1, 10)),
            {"type": "subagent", "t": 5.0, "requests": [call(2.0, range(20, 28))]},
            call(40.0, range(1, 14), stop="end_turn"),
        ],
    )
    trace = read(archive(tmp_path / "x.tar.zst", session), Users(1, None))
    check(trace)
    assert trace.name == "weka-256-u1-asrecorded"
    assert np.diff(trace.start).tolist() == [2, 2, 3]
    assert trace.unique == 5
    assert trace.time_s.tolist() == [0.0, 7.0, 40.0]
    assert trace.outlook.tolist() == [
        Outlook.TOOL_CALL,
        Outlook.TOOL_CALL,
        Outlook.END_OF_SESSION,
    ]


def test_weka_caps_idle_time_after_the_answer(tmp_path):
    session = weka("a", [call(0.0, [1, 2, 3, 4], api=10.0), call(1000.0, [1, 2, 3, 4])])
    trace = read(archive(tmp_path / "x.tar.zst", session), Users(1, 60.0))
    assert trace.time_s.tolist() == [0.0, 70.0]


def test_weka_overlapping_calls_follow_the_answer(tmp_path):
    session = weka("a", [call(0.0, [1, 2, 3, 4], api=10.0), call(3.0, [1, 2, 3, 4])])
    trace = read(archive(tmp_path / "x.tar.zst", session), Users(1, 60.0))
    assert trace.time_s.tolist() == [0.0, 10.0]


def test_weka_ids_are_the_sessions_own_and_copies_count_once(tmp_path):
    one = weka("a", [call(0.0, range(8))])
    other = weka("b", [call(0.0, range(8), tokens=600)])
    path = archive(tmp_path / "x.tar.zst", one, {**one, "id": "copy of a"}, other)
    trace = read(path, Users(5, 60.0))
    check(trace)
    assert trace.requests == 2
    assert trace.unique == 4


def test_weka_users_take_the_next_session_when_one_ends(tmp_path):
    sessions = [
        weka(str(i), [call(0.0, [1, 2, 3, 4 + i]), call(10.0 + i, [1, 2, 3, 4 + i])])
        for i in range(5)
    ]
    path = archive(tmp_path / "x.tar.zst", *sessions)
    trace = read(path, Users(2, None, seed=3))
    check(trace)
    running = [int((trace.time_s == 0).sum())]
    assert running == [2]
    again = read(path, Users(2, None, seed=3))
    assert np.array_equal(trace.blocks, again.blocks)
    assert not np.array_equal(trace.blocks, read(path, Users(5, None, seed=3)).blocks)
    assert read(path, Users(2, None, sessions_max=2)).requests == 4


def test_weka_sample():
    trace = read(TRACES / "weka.tar.zst", Users(3))
    check(trace)
    assert trace.block_tokens == 256
    assert (trace.outlook == Outlook.END_OF_SESSION).sum() == 7


def test_ragpulse_parts_make_chains(tmp_path):
    jsonl(tmp_path / "1_sys_prompt.jsonl", {"sys_prompt_id": 1, "token_length": 200})
    jsonl(
        tmp_path / "2_passages.jsonl",
        {"passage_id": 2, "token_length": 100},
        {"passage_id": 3, "token_length": 100},
    )
    jsonl(tmp_path / "3_history.jsonl", {"history_id": 4, "token_length": 60})
    jsonl(tmp_path / "4_user_input.jsonl", {"user_input_id": 5, "token_length": 60})
    jsonl(tmp_path / "5_web_search.jsonl", {"web_search_id": 6, "token_length": 1})

    def request(at, passages):
        parts = {"sys_prompt": [1], "passages_ids": passages, "user_input": [5]}
        return {"timestamp": str(at), "hash_ids": parts, "session_id": "s"}

    jsonl(tmp_path / "0_trace.jsonl", request(9, [3]), request(1, [2]), request(2, [2, 3]))
    trace = read(tmp_path)
    check(trace)
    assert trace.tokens.tolist() == [360, 460, 360]
    # 128 tokens are the prompt's alone, the second block ends within the first passage
    first, second, third = (trace.chain(r).tolist() for r in range(3))
    assert first == second[:2]
    assert len(second) == 3
    assert third[0] == first[0]
    assert third[1] != first[1]


def test_generic_lines(tmp_path):
    path = jsonl(
        tmp_path / "g.jsonl",
        {"time_s": 0, "block_tokens": 4, "blocks": [7, 8], "next": "tool_call", "answer_s": 2},
        {"time_s": 1, "tokens": list(range(9)), "prompt_tokens": 11},
        {"time_s": 1, "tokens": [0, 1, 2, 3, 9, 9, 9, 9]},
        {"time_s": 5, "text": "0123456789abcdef" * 2},
    )
    trace = read(path)
    check(trace)
    assert trace.block_tokens == 4
    assert np.diff(trace.start).tolist() == [2, 2, 2, 2]
    assert trace.tokens.tolist() == [8, 11, 8, 8]
    assert trace.chain(1)[0] == trace.chain(2)[0]
    assert trace.outlook[0] == Outlook.TOOL_CALL


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"what": 1}], "no known format"),
        ([{"time_s": 1, "blocks": [1]}, {"time_s": 0, "blocks": [1]}], "not in order"),
        ([{"time_s": 0, "blocks": [1, 2]}, {"time_s": 1, "blocks": [2]}], "do not name"),
        ([{"time_s": 0, "session": "x"}], "none of: blocks, tokens, text"),
        ([{"time_s": 0, "blocks": [1], "next": "nap"}], "next is 'nap'"),
        ([{"hash_ids": [1]}], "no field 'timestamp'"),
    ],
)
def test_bad_lines_are_named(tmp_path, lines, message):
    with pytest.raises(InvalidRequest, match=message):
        read(jsonl(tmp_path / "bad.jsonl", *lines))


MOONCAKE = {"timestamp": 0, "input_length": 9, "hash_ids": [1]}
LMCACHE = {"timestamp": 0, "input": "x", "session_id": "s"}
GENERIC = {"time_s": 0, "blocks": [1]}
NO_TIMES = ["12", None, True, float("nan"), float("inf"), 1e300, 10**400, [1]]
NO_LENGTHS = [-1, 2.5, "9", 10**15, float("nan"), None]
NO_IDS = ["12", None, {"1": 1}, [1.5], [None], [[1]], [True], [10**30]]


@pytest.mark.parametrize(
    ("good", "field", "bad"),
    [
        *((MOONCAKE, "timestamp", bad) for bad in NO_TIMES),
        *((MOONCAKE, "input_length", bad) for bad in NO_LENGTHS),
        *((MOONCAKE, "hash_ids", bad) for bad in [*NO_IDS, ["1"]]),
        *((LMCACHE, "timestamp", bad) for bad in NO_TIMES),
        *((LMCACHE, "input", bad) for bad in (1, None, ["x"])),
        *((GENERIC, "time_s", bad) for bad in NO_TIMES),
        *((GENERIC, "blocks", bad) for bad in NO_IDS),
        *((GENERIC, "prompt_tokens", bad) for bad in NO_LENGTHS),
        *((GENERIC, "answer_s", bad) for bad in [*NO_TIMES, -1]),
        *((GENERIC, "block_tokens", bad) for bad in [*NO_LENGTHS, 0]),
        *(({"time_s": 0, "tokens": []}, "tokens", bad) for bad in [*NO_IDS, [-1], [1 << 32]]),
    ],
)
def test_values_that_cannot_be_right_are_named(tmp_path, good, field, bad):
    lines = [{**good, field: bad}] if field == "block_tokens" else [good, {**good, field: bad}]
    with pytest.raises(InvalidRequest) as raised:
        read(jsonl(tmp_path / "bad.jsonl", *lines))
    message = str(raised.value)
    value = bad[0] if isinstance(bad, list) and len(bad) == 1 else bad
    assert f"line {len(lines)}" in message or "its first line" in message
    assert field in message
    assert repr(value)[:20] in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *(("t", bad) for bad in NO_TIMES),
        *(("api_time", bad) for bad in [x for x in NO_TIMES if x is not None] + [-1]),
        *(("in", bad) for bad in NO_LENGTHS),
        *(("hash_ids", bad) for bad in [*NO_IDS, [-1], [1 << 40]]),
        *(("type", bad) for bad in (1, None)),
        *(("requests", bad) for bad in (1, None, [1])),
    ],
)
def test_values_of_sessions_that_cannot_be_right_are_named(tmp_path, field, bad):
    good = call(0.0, [1, 2, 3, 4])
    session = weka("a", bad if field == "requests" else [{**good, field: bad}])
    (tmp_path / "s.json").write_text(json.dumps(session))
    with pytest.raises(InvalidRequest, match=r"s\.json.*" + field):
        read(tmp_path / "s.json")


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_file_that_is_no_session_is_named(tmp_path, content):
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"s\.json is not"):
        read(tmp_path / "s.json")


def test_bad_files_are_named(tmp_path):
    with pytest.raises(InvalidRequest, match="there is no trace"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "x.jsonl").write_text("{}\nnot json\n")
    with pytest.raises(InvalidRequest, match="no known format"):
        read(tmp_path / "x.jsonl")
    (tmp_path / "y.jsonl").write_text('{"time_s": 0, "blocks": []}\nnot json\n')
    with pytest.raises(InvalidRequest, match="line 2 is not JSON"):
        read(tmp_path / "y.jsonl")
    with pytest.raises(InvalidRequest, match="can't be made of"):
        read(archive(tmp_path / "z.tar.zst", weka("a", [call(0, [1])])), Users(block_tokens=100))
    loop = weka("a", [call(0, [1, 2, 3, 4]), call(1, [5, 6, 7, 8, 1, 2, 3, 4])])
    with pytest.raises(InvalidRequest, match="not prefix-chained"):
        read(archive(tmp_path / "w.tar.zst", loop))
