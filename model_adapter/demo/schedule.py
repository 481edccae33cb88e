"""Which prompts the demo plays, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from model_adapter.chat import render_chat
from model_adapter.demo.conversations import Conversation
from model_adapter.session.source import TokenIds
from model_adapter.tokenizer import encode_prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of the model. `number`: from 1, within its session."""

    session: str
    number: int
    prompt_ids: TokenIds

    @property
    def label(self) -> str:
        """Short name for a table or a picture."""
        return f"{self.session[:4]}·{self.number}"


def schedule(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, turns_max: int
) -> list[Turn]:
    """The first `turns_max` turns of every session, one turn of each session after another, as a
    server with several agents sees them."""
    return [
        Turn(
            conversation.name,
            k + 1,
            np.array(
                encode_prompt(tokenizer, render_chat(conversation.prompts[k]).text), np.uint32
            ),
        )
        for k in range(turns_max)
        for conversation in conversations
        if k < len(conversation.prompts)
    ]
