"""A server over the `tiny` checkpoint in this process, on a socket of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import openai
import tiny_checkpoint as tiny

from model_adapter.serve import Served, ServeLimits, create_app
from model_adapter.serve.sampling import Choice
from model_adapter.serve.server import LOOPBACK_HOSTS, make_server, open_socket, url_of
from model_adapter.session import CachedSession, StoreBlocks
from model_adapter.tokenizer import load_tokenizer

NAME = "tiny"


@cache
def tokenizer():
    return load_tokenizer(tiny.checkpoint())


def scripted(*answers: str):
    """A `choose` by which the model says what stands here, answer after answer, then stops.

    A random model calls no tools. The prompt goes through the model; the answer does not.
    """
    left = list(answers)

    def choose(temperature, top_p, seed):
        def decode(model, cache, logits, max_tokens, stop_ids):
            ids = [*tokenizer().encode(left.pop(0)).ids, model.config.eos_token]
            yield from ids[:max_tokens]

        return Choice(decode)

    return choose


@contextmanager
def serving(client=None, limits: ServeLimits | None = None, **served) -> Iterator[str]:
    """The base URL of a running server. `client`: of the store, if any."""
    source = None if client is None else StoreBlocks(client, tiny.namespace())
    limits = limits or ServeLimits(shutdown_s_max=2)
    session = served.pop("session", None) or CachedSession(tiny.model(), source)
    app = create_app(Served(session, tokenizer(), NAME, limits, **served), LOOPBACK_HOSTS)
    with open_socket("127.0.0.1", 0) as listener:
        server = make_server(app, limits)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def openai_client(url: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, **options)


@contextmanager
def chatting(client=None, **served) -> Iterator[openai.OpenAI]:
    """The official client of a running server."""
    with serving(client, **served) as url, openai_client(url) as api:
        yield api
