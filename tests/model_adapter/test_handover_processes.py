"""`ds41f prefill` and `ds41f decode` as processes, and the death of every party."""

import time
from functools import cache

import numpy as np
import pytest
import tiny_checkpoint as tiny
from drafting import drafter
from image_prompts import embeddings, picture
from nodes import Node, until
from tiny_checkpoint import BLOCK_TOKENS

import kvstore
from model_adapter.chat.tokens import IMAGE
from model_adapter.decoding import SamplingParams, generate
from model_adapter.demo.conversations import training_texts
from model_adapter.demo.daemon import Daemon
from model_adapter.dspark import SequenceDrafts
from model_adapter.handover import Announcement, Sampling
from model_adapter.handover.record import PROMPT_SUFFIX
from model_adapter.tokenizer import encode_prompt, load_tokenizer
from model_adapter.vision import place_images, read_image

TEXT = " ".join(training_texts())
SHORT, OTHER, LONG = TEXT[:900], TEXT[900:1800], TEXT[1800:11000]
"""Of one another no prefixes."""
TOKENS = 16
BOTH = ["--checkpoint", tiny.checkpoint(), "--block-tokens", BLOCK_TOKENS]


@cache
def ids_of(text: str) -> np.ndarray:
    return np.asarray(encode_prompt(load_tokenizer(tiny.checkpoint()), text), np.uint32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def daemon(directory):
    with Daemon(directory, 16 << 20, 256 << 20) as running:
        yield running


@pytest.fixture
def start(daemon, directory, request):
    """Start a node of this test's own request."""

    def started(command, *arguments, text=None):
        words = [command, *BOTH, "--store", daemon.url, "--request-id", request.node.name]
        if text is not None:
            path = directory / f"{len(text)}.txt"
            path.write_text(text)
            words += ["--prompt-file", path]
        if command == "decode":
            words += ["--ids"]
        return Node(directory, *words, *arguments)

    return started


def answer(text: str, tokens: int, speculate: bool = False, **sampling) -> list[int]:
    """Of one process without a store."""
    model, ids = tiny.model(), ids_of(text)
    drafts = SequenceDrafts(drafter(model)) if speculate else None
    cache = model.new_cache()
    logits = model.prefill(cache, ids, observer=drafts.observer if drafts else None)
    return list(generate(model, cache, logits, SamplingParams(tokens, **sampling), (1,), drafts))


@pytest.mark.parametrize(
    ("speculate", "sampling"),
    [([], {}), (["--speculate"], {"temperature": 0.9, "top_p": 0.95, "seed": 5})],
    ids=["greedy", "sampled, speculative"],
)
def test_two_processes_say_what_one_does(start, speculate, sampling):
    text = OTHER if sampling else SHORT
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in sampling.items()]
    waiting = start("decode", *speculate, "--max-tokens", TOKENS)
    prefill = start("prefill", *speculate, *flags, "--chunk-tokens", 64, text=text)
    assert prefill.end() == 0, prefill.err
    assert waiting.end() == 0, waiting.err
    assert waiting.ids == answer(text, TOKENS, bool(speculate), **sampling)
    assert "blocks came meanwhile" in waiting.err
    assert "handed over" in prefill.err
    # what was handed over is given back once it was used
    late = start("decode", "--wait-s", 0)
    assert late.end() == 3


def pictured(directory, text: str, *seeds: int):
    """A text with a picture in every part, the first in the first block, so that nothing of another
    text's is hit: the flags that give it, its tokens, and the answer of one process."""
    step = len(text) // len(seeds)
    parts = [text[i * step : (i + 1) * step] for i in range(len(seeds))]
    marked = "".join(f"{part[:40]}{IMAGE}{part[40:]}" for part in parts)
    name = "-".join(map(str, seeds))
    (directory / name).write_text(marked)
    flags = ["--prompt-file", directory / name]
    for seed in seeds:
        path = directory / f"{seed}.png"
        path.write_bytes(picture(seed))
        flags += ["--image", path]
    model = tiny.model()
    images = [read_image(picture(seed), model.config.vision) for seed in seeds]
    placed = place_images(ids_of(marked), images, model.config.image_token)
    assert placed.images[0].start < BLOCK_TOKENS
    cache = model.new_cache()
    logits = model.prefill(cache, placed.token_ids, image_embeddings=embeddings(placed))
    params = SamplingParams(TOKENS)
    return flags, placed, list(generate(model, cache, logits, params, (1,)))


@pytest.mark.parametrize("seeds", [(1,), (2, 3)])
def test_images_are_handed_over_as_names(start, directory, seeds):
    flags, _, expected = pictured(directory, SHORT, *seeds)
    waiting = start("decode", "--max-tokens", TOKENS)
    prefill = start("prefill", *flags, "--chunk-tokens", 64)
    assert prefill.end() == 0, prefill.err
    assert waiting.end() == 0, waiting.err
    assert waiting.ids == expected
    # other pixels are another prompt, of the same tokens
    other, placed, said = pictured(directory, SHORT, *(seed + 10 for seed in seeds))
    assert said != expected
    assert start("prefill", *other).end() == 0
    again = start("decode", "--max-tokens", TOKENS)
    assert again.end() == 0, again.err
    assert again.ids == said
    assert f"{len(placed.token_ids)} tokens:" in again.err


def test_images_are_computed_anew_from_pixels_alone(start, daemon, directory, request):
    flags, placed, expected = pictured(directory, OTHER, 4)
    announcement = Announcement(
        placed.token_ids.astype(np.uint32), tuple(placed.spans), Sampling(0.0, 1.0, 0)
    )
    with kvstore.connect(daemon.url, deadline_s=5.0) as client:
        handle = client.open_namespace(tiny.namespace())
        client.put_handover(handle, request.node.name + PROMPT_SUFFIX, announcement.to_bytes())
    recompute = ["--wait-s", 0.2, "--recompute", "--keep", "--max-tokens", TOKENS]
    others, _, _ = pictured(directory, OTHER, 5)
    for given in ((), others):
        blind = start("decode", *recompute, *given)
        assert blind.end() == 4, blind.err
        assert "its prompt has 1 images, and the store does not keep pixels" in blind.err
    seeing = start("decode", *recompute, *flags)
    assert seeing.end() == 0, seeing.err
    assert seeing.ids == expected


def test_pictures_and_placeholders_have_to_agree(start, directory):
    flags, _, _ = pictured(directory, SHORT, 1)
    for arguments, says in (
        (flags[:2], "1 image tokens behind the last of 0 images"),
        ([*flags, *flags[2:]], f"1 image placeholders for 2 images; write {IMAGE} where each"),
        ([*flags[:2], "--image", directory / "1"], "no picture of PNG"),
        ([*flags[:2], "--image", directory / "none.png"], "none.png can't be read"),
    ):
        node = start("prefill", *arguments)
        assert node.end() == 2
        assert says in node.err
    alone = start("decode", *flags[2:])
    assert alone.end() == 2
    assert "--image needs the --prompt-file" in alone.err


def ready_blocks(daemon, text: str) -> int:
    with kvstore.connect(daemon.url, deadline_s=5.0) as client:
        handle = client.open_namespace(tiny.namespace())
        return client.match(handle, handle.block_keys(ids_of(text))).hit_blocks


def test_a_prefill_that_dies_half_way(start, daemon):
    prefill = start("prefill", "--chunk-tokens", BLOCK_TOKENS, text=LONG)
    until(lambda: ready_blocks(daemon, LONG) >= 2 or not prefill.running, "blocks")
    prefill.kill()
    began = time.monotonic()
    decode = start("decode", "--wait-s", 0.5)
    assert decode.end() == 3
    assert "the hand-over of test_a_prefill_that_dies_half_way did not come within 0.5 s" in (
        decode.err
    )
    assert "retry, or decode with --recompute" in decode.err
    assert time.monotonic() - began < 60
    alone = start("decode", "--wait-s", 0.1, "--recompute", "--max-tokens", 4)
    assert alone.end() == 0, alone.err
    assert len(alone.ids) == 4
    assert "recomputed (HandoverLost)" in alone.err
    # from the blocks that the dead one left
    assert "prefix               hit" in alone.err
    again = start("prefill", text=LONG)
    assert again.end() == 0, again.err
    assert start("decode", "--max-tokens", 4).end() == 0


def test_a_decode_that_dies_and_another_that_takes_over(start):
    assert start("prefill", "--temperature", 0.7, "--seed", 3, text=SHORT).end() == 0
    first = start("decode", "--max-tokens", 2000)
    until(lambda: len(first.ids) >= 5 or not first.running, "tokens")
    first.kill()
    second = start("decode", "--max-tokens", 40)
    assert second.end() == 0, second.err
    said = first.ids[:40]
    assert second.ids[: len(said)] == said


def test_a_hand_over_that_expired(start):
    prefill = start("prefill", "--ttl-s", 0.2, text=SHORT)
    assert prefill.end() == 0
    time.sleep(0.2)
    decode = start("decode", "--wait-s", 0.2)
    assert decode.end() == 3
    assert "it has expired" in decode.err
    no_prompt = start("decode", "--wait-s", 0.2, "--recompute")
    assert no_prompt.end() == 3
    assert "give --prompt-file" in no_prompt.err


def test_a_store_that_restarts_in_between(tmp_path, request):
    name = request.node.name
    (tmp_path / "prompt").write_text(SHORT)
    words = [*BOTH, "--request-id", name, "--prompt-file", tmp_path / "prompt"]
    with Daemon(tmp_path, 16 << 20, 256 << 20) as daemon:
        words += ["--store", daemon.url]
        assert Node(tmp_path, "prefill", *words).end() == 0
    # nobody is there
    nobody = Node(tmp_path, "decode", *words, "--ids", "--wait-s", 0.3)
    unheard = Node(tmp_path, "prefill", *words)
    waiting = Node(tmp_path, "decode", *words, "--ids", "--wait-s", 100, "--max-tokens", TOKENS)
    assert nobody.end() == unheard.end() == 3
    assert "is not handed over" in unheard.err
    assert "the store did not come up within 0.3 s" in nobody.err
    with Daemon(tmp_path, 16 << 20, 256 << 20):
        # blocks came back from SSD, the hand-over did not
        alone = Node(
            *(tmp_path, "decode", *words, "--ids", "--wait-s", 0.3),
            *("--recompute", "--max-tokens", TOKENS),
        )
        assert alone.end() == 0, alone.err
        assert (
            f"hit                  {len(ids_of(SHORT)) // BLOCK_TOKENS * BLOCK_TOKENS} tokens (ssd"
            in (alone.err)
        )
        # and the one that waits takes what is handed over anew
        assert Node(tmp_path, "prefill", *words).end() == 0
        assert waiting.end() == 0, waiting.err
    assert waiting.ids == alone.ids
