"""Small models: the threads of one operation would wait for each other longer than they compute."""

import pytest
import torch

from model_adapter.session.fetch_choice import FetchChoice

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def every_hit_is_taken(request, monkeypatch):
    """How fast this machine is at the moment decides nothing, but where that is what is tested."""
    if request.module.__name__ != "test_fetch_choice":
        monkeypatch.setattr(FetchChoice, "computed", lambda *_: None)
