"""What `ds41f serve` does; apart from its flags, so that `--help` loads no torch."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

import kvstore
from model_adapter.commands.run_generate import parse_bytes
from model_adapter.devices import device_of
from model_adapter.dspark import Drafter
from model_adapter.errors import InputError
from model_adapter.model import Model
from model_adapter.replay import Mode
from model_adapter.serve import Served, ServeLimits, create_app
from model_adapter.serve.sampling import Choosing
from model_adapter.serve.server import (
    LOOPBACK_HOSTS,
    is_loopback,
    make_server,
    open_socket,
    parse_listen,
    run_until_signal,
    url_of,
)
from model_adapter.session import CachedSession, StoreBlocks, namespace_of
from model_adapter.session.identity import model_name_of
from model_adapter.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The flags of `ds41f serve`."""

    checkpoint: Path
    store: str | None
    listen: str
    allow_remote: bool
    model_name: str | None
    mode: Mode
    dtype: str
    speculate: bool
    snapshots: bool
    block_tokens: int
    deadline_s: float
    weight_cache: str
    device: str
    limits: ServeLimits


def run(options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM. One line on stdout says where, once requests are taken.

    Raises `InputError` for an address that can't be had, and what a checkpoint or store raises that
    can't be opened: a server without the store it was told to use would hide that it is slow.
    """
    host, port = parse_listen(options.listen)
    loopback = is_loopback(host)
    if not loopback and not options.allow_remote:
        raise InputError(
            f"{host} is an address that other machines reach, and whoever reaches this server may "
            "use it; listen on 127.0.0.1, or say --allow-remote"
        )
    device = device_of(options.device)
    tokenizer = load_tokenizer(options.checkpoint)
    dtype = getattr(torch, options.dtype)
    model = Model.load(options.checkpoint, dtype, parse_bytes(options.weight_cache), device)
    with ExitStack() as stack:
        source = None
        if options.store:
            client = kvstore.connect(options.store, deadline_s=options.deadline_s)
            stack.enter_context(client)
            namespace = namespace_of(model, options.checkpoint, options.block_tokens)
            source = StoreBlocks(client, namespace)
        served = Served(
            session=CachedSession(model, source, options.mode, snapshots=options.snapshots),
            tokenizer=tokenizer,
            name=options.model_name or model_name_of(model),
            limits=options.limits,
            choose=Choosing(Drafter(model) if options.speculate else None),
        )
        listener = stack.enter_context(open_socket(host, port))
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        app = create_app(served, LOOPBACK_HOSTS if loopback else None)
        print(f"{served.name} at {url_of(listener)}", flush=True)
        run_until_signal(make_server(app, options.limits), listener)
