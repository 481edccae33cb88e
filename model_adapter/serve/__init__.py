"""An OpenAI-compatible endpoint over a cached session.

A request passes a desk (a place among at most so many, its body within limits), is checked and made
a prompt on a helper thread, waits for the one thread that runs the model, and is answered whole or
piece by piece. What runs where: `app` on the event loop, `calls` and `prompts` on helper threads,
`worker` and `text` on the model's.
"""

from model_adapter.serve.app import create_app
from model_adapter.serve.calls import Served
from model_adapter.serve.limits import ServeLimits

__all__ = ["ServeLimits", "Served", "create_app"]
