"""`nanochat serve`: from a trained model to an address that answers, and a clean end."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable
from typing import Any

from nanochat_lib.errors import UserError
from nanochat_lib.serve import server
from nanochat_lib.serve.app import Settings, check_settings, make_app


def launch(open_engine: Callable[[], tuple[Any, Any, str]], *, port: int, rows: int, **settings: Any) -> None:
    """Serves the engine that `open_engine` gives with its folder and stage, until it is told to stop.

    What can be wrong with the address or an option is said before the model is loaded. `settings`: app.Settings'.
    """
    if rows < 1:
        raise UserError(f"rows {rows} must be at least 1")
    if settings.get("token") == "auto":
        settings["token"] = secrets.token_urlsafe(24)
    check_settings(Settings(**settings))
    sock = server.bind(settings["host"], port)
    try:
        engine, folder, stage = open_engine()
        serve(engine, sock, rows, Settings(**settings, **described(engine, folder, stage)))
    finally:
        sock.close()


def serve(engine: Any, sock: Any, rows: int, settings: Settings) -> None:
    """Greets in the terminal, then serves `engine` (nanochat_lib.Engine) on a listening socket."""
    from nanochat_lib.batching import BatchingEngine, Request
    from nanochat_lib.serve.next_tokens import NextTokens

    tokenizer = engine.tokenizer
    with BatchingEngine(engine, rows) as batching:
        app = make_app(batching, tokenizer, settings, context=engine.context, next_tokens=NextTokens(engine))
        for line in server.greeting(server.address(sock), settings, size(engine), batching.stats()):
            print(line, flush=True)
        # Compiles the step while the first visitor still types.
        batching.submit(Request([tokenizer.bos_id], max_tokens=2), lambda piece: None)
        server.run(app, sock)
    print("nanochat: stopped", file=sys.stderr)


def described(engine: Any, folder: Any, stage: str) -> dict[str, str]:
    """model: a name for clients, made of the run's folder and the stage; title for people; device."""
    import jax

    name = re.sub(r"[^a-z0-9._-]+", "-", folder.resolve().name.lower()).strip("-") or "nanochat"
    return {"model": f"{name}-{stage}", "title": f"{folder} · {stage}", "device": jax.devices()[0].device_kind}


def size(engine: Any) -> str:
    """The model in a few words."""
    from nanochat_lib.sizing import count_params

    config = engine.setup.config
    total = count_params(config)["total"]
    return f"{config.n_layer} layers, {total / 1e6:.3g}M parameters, context {engine.context:,}"
