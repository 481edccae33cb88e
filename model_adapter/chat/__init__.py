"""The chat format of DS4.1F: conversations to prompts, answers to messages (ds41f §6)."""

from model_adapter.chat.dsml import ToolCall
from model_adapter.chat.messages import ImageRef
from model_adapter.chat.options import ChatOptions
from model_adapter.chat.parse import Answer, AnswerParser, Delta, new_call_id, parse_answer
from model_adapter.chat.render import RenderedPrompt, render_chat
from model_adapter.errors import ChatError

__all__ = [
    "Answer",
    "AnswerParser",
    "ChatError",
    "ChatOptions",
    "Delta",
    "ImageRef",
    "RenderedPrompt",
    "ToolCall",
    "new_call_id",
    "parse_answer",
    "render_chat",
]
