"""What the endpoint tells the store when an answer has ended."""

import pytest
import tiny_checkpoint as tiny
from serving import NAME, chatting, scripted, tokenizer
from tiny_checkpoint import BLOCK_TOKENS

import kvstore
from kvstore import Outlook
from model_adapter.chat.dsml import ToolCall, write_calls
from model_adapter.chat.tokens import THINK_CLOSE, THINK_OPEN
from model_adapter.session import CachedSession, StoreBlocks

ASKED = [{"role": "user", "content": "What is the weather in Bonn, and what will it be?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLING = "Let me look.\n\n" + write_calls([ToolCall("weather", {"place": "Bonn"})])


@pytest.fixture
def client(tmp_path):
    with tiny.store(tmp_path) as client:
        yield client


class Told(CachedSession):
    """Keeps what it was told of answers, and passes it on."""

    def __init__(self, client) -> None:
        super().__init__(tiny.model(), StoreBlocks(client, tiny.namespace()))
        self.answers: list[tuple] = []

    def answered(self, token_ids, outlook, lasting_tokens=None, images=()):
        super().answered(token_ids, outlook, lasting_tokens, images)
        self.answers.append((list(token_ids), outlook, lasting_tokens))


def told_of(client, said: str, **options) -> list[tuple]:
    session = Told(client)
    with chatting(session=session, choose=scripted(said)) as api:
        options = {"max_tokens": 900, "temperature": 0} | options
        api.chat.completions.create(model=NAME, messages=ASKED, **options)
    return session.answers


def test_a_person_follows_an_answer_and_all_of_it_stays(client):
    [(ids, outlook, lasting)] = told_of(client, "Rain.")
    assert outlook is Outlook.USER_TURN
    assert lasting is None
    assert ids[-1] == tiny.model().config.eos_token
    assert client.stat().counters["answers_told"] == 1


def test_reasoning_is_told_to_go_with_the_next_turn(client):
    said = f"It is {'really ' * 40}cold.{THINK_CLOSE}Rain."
    [(ids, outlook, lasting)] = told_of(client, said, reasoning_effort="high")
    assert outlook is Outlook.USER_TURN
    text = tokenizer().decode(ids, skip_special_tokens=False)
    kept = tokenizer().decode(ids[:lasting], skip_special_tokens=False)
    assert kept == text[: text.index(THINK_OPEN)]
    assert BLOCK_TOKENS < lasting < len(ids) - BLOCK_TOKENS


def test_a_tool_follows_a_call_and_all_of_it_stays(client):
    [(_, outlook, lasting)] = told_of(client, CALLING, tools=TOOLS)
    assert outlook is Outlook.TOOL_CALL
    assert lasting is None


def test_nothing_is_known_of_a_cut_answer_or_a_plain_completion(client):
    assert told_of(client, "Rain and wind.", max_tokens=2) == []
    session = Told(client)
    with chatting(session=session, choose=scripted("Rain.")) as api:
        api.completions.create(model=NAME, prompt="Hello", max_tokens=50)
    assert session.answers == []


def test_a_store_that_is_gone_costs_no_answer(client, caplog):
    session = Told(client)
    with chatting(session=session, choose=scripted("Rain.")) as api:

        def gone(*_args):
            raise kvstore.errors.Unavailable("no daemon")

        session.source._client.answered = gone
        answer = api.chat.completions.create(model=NAME, messages=ASKED, max_tokens=50)
    assert answer.choices[0].message.content == "Rain."
    assert "telling how an answer ended: no daemon" in caplog.text
