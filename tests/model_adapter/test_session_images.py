"""Prompts with images over the store: what their pixels decide, and replays that cross them."""

import pytest
import tiny_checkpoint as tiny
import torch
from image_prompts import START, embeddings, picture, prompt
from tiny_checkpoint import BLOCK_TOKENS, WINDOW

from model_adapter.errors import ImageError
from model_adapter.generate import greedy
from model_adapter.session import CachedSession
from model_adapter.vision import ImagePrompt

TOKENS = 6


def answer(session: CachedSession, prompt: ImagePrompt, max_tokens: int = TOKENS):
    images = [placed.image for placed in prompt.images]
    return session.generate(prompt.token_ids, max_tokens, images=images)


def blocks(cache) -> list[bytes]:
    count = cache.loaded_tokens // BLOCK_TOKENS
    return [
        b"".join(s.tobytes() for s in cache.block_sections(i, BLOCK_TOKENS)) for i in range(count)
    ]


def resumed(prompt: ImagePrompt, hit_tokens: int, rows: torch.Tensor):
    """Answer and blocks of a replay straight from the model, `rows` in the place of its images."""
    full = tiny.model().new_cache()
    tiny.model().prefill(full, prompt.token_ids, image_embeddings=embeddings(prompt))
    cache = tiny.model().new_cache()
    for i in range(hit_tokens // BLOCK_TOKENS):
        cache.load_block(i, BLOCK_TOKENS, full.block_sections(i, BLOCK_TOKENS))
    logits = tiny.model().resume(cache, prompt.token_ids, hit_tokens, image_embeddings=rows)
    return list(greedy(tiny.model(), cache, logits, TOKENS)), blocks(cache)


@pytest.fixture
def client(tmp_path):
    with tiny.store(tmp_path) as client:
        yield client


def test_prompts_that_differ_only_in_pixels_share_nothing_from_the_image_on(client):
    for seed in (1, 2):
        report = answer(tiny.session(client), prompt([picture(seed)], START, 60)).report
        assert report.hit_tokens == (0 if seed == 1 else BLOCK_TOKENS)
    one, two = (prompt([picture(seed)], START, 60) for seed in (1, 2))
    assert (one.token_ids == two.token_ids).all()


@pytest.mark.parametrize("form", [("PNG", {"compress_level": 0}), ("WEBP", {"lossless": True})])
def test_the_same_pixels_at_the_same_place_hit_whatever_the_file(client, form):
    first = prompt([picture(1)], START, 60)
    kind, options = form
    again = prompt([picture(1, kind, **options)], START, 60)
    cold = answer(tiny.session(client), first)
    warm = answer(tiny.session(client), again)
    assert cold.report.hit_tokens == 0
    assert warm.report.hit_tokens == 4 * BLOCK_TOKENS > first.images[0].stop


def test_the_same_image_at_another_place_is_another_prefix(client):
    answer(tiny.session(client), prompt([picture(1)], START, 60))
    moved = prompt([picture(1)], START + 2, 60)
    assert answer(tiny.session(client), moved).report.hit_tokens == BLOCK_TOKENS


@pytest.mark.parametrize(
    ("behind", "hit_tokens"),
    # the replay lies within the image, and across its end
    [(3, 2 * BLOCK_TOKENS), (6, 3 * BLOCK_TOKENS)],
)
def test_a_replay_over_an_image_is_the_one_with_its_embeddings_kept(client, behind, hit_tokens):
    short = prompt([picture(1)], START, behind)
    longer = prompt([picture(1)], START, 60)
    assert (longer.token_ids[: len(short.token_ids)] == short.token_ids).all()
    kept = embeddings(short)
    answer(tiny.session(client, snapshots=False), short, 1)
    warm = answer(tiny.session(client, snapshots=False), longer)
    assert warm.report.hit_tokens == hit_tokens
    assert warm.report.replayed_tokens == WINDOW
    first = max(hit_tokens - WINDOW - START, 0)
    expected, expected_blocks = resumed(longer, hit_tokens, kept[first:])
    assert warm.token_ids == expected
    handle = client.open_namespace(tiny.namespace())
    keys = handle.block_keys(longer.token_ids, longer.spans)
    with client.acquire(handle, keys) as lease:
        stored = [b"".join(map(bytes, b.sections)) for b in client.read(lease, keys)]
    assert stored == expected_blocks[: len(keys)]
    # and the embeddings do decide: others leave other blocks behind the hit
    others = embeddings(prompt([picture(2)], START, behind))
    assert stored != resumed(longer, hit_tokens, others[first:])[1][: len(keys)]


def test_cold_answers_are_those_of_the_model_alone(client):
    with_image = prompt([picture(1)], START, 30)
    cache = tiny.model().new_cache()
    rows = embeddings(with_image)
    logits = tiny.model().prefill(cache, with_image.token_ids, image_embeddings=rows)
    expected = list(greedy(tiny.model(), cache, logits, TOKENS))
    assert answer(tiny.session(client, chunk_tokens=24), with_image).token_ids == expected
    assert answer(CachedSession(tiny.model()), with_image).token_ids == expected


def test_images_before_the_replay_are_not_embedded_again(client, monkeypatch):
    two = prompt([picture(1), picture(2)], 5, 60, 30)
    answer(tiny.session(client, snapshots=False), prompt([picture(1)], 5, 60), 1)
    session = tiny.session(client, snapshots=False)
    seen = []
    embed = session.vision.embed
    monkeypatch.setattr(session.vision, "embed", lambda im: seen.append(im.digest) or embed(im))
    report = answer(session, two).report
    assert report.hit_tokens == 3 * BLOCK_TOKENS
    assert report.hit_tokens - WINDOW >= two.images[0].stop
    assert seen == [two.images[1].image.digest]


def test_image_tokens_and_images_have_to_agree():
    session = CachedSession(tiny.model())
    one = prompt([picture(1)], 5, 5)
    with pytest.raises(ImageError, match="51 image tokens behind the last of 0 images"):
        session.generate(one.token_ids, 1)
    with pytest.raises(ImageError, match="image 1 needs 51 image tokens"):
        session.generate(one.token_ids, 1, images=[one.images[0].image] * 2)
