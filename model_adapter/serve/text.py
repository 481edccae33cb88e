"""From tokens as they come to text that can be shown."""

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from model_adapter.tokenizer import decode_answer


class StopScanner:
    """Ends a text before the leftmost of `stops`.

    Text that may still become a stop string is held back until it can't.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped = False
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> str:
        """What `text` settles; nothing behind a stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        cut = len(self._held) - max((_overlap(self._held, s) for s in self._stops), default=0)
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def finish(self) -> str:
        """What was held back; the text is over."""
        return "" if self.stopped else self._held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that `stop` may begin with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class AnswerText:
    """The text of an answer, token by token: whole characters only, up to a stop string.

    `stop_ids`: tokens that have no text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], stop_ids: Collection[int]):
        self._tokenizer = tokenizer
        self._scanner = StopScanner(stops)
        self._stop_ids = stop_ids
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._chars = 0

    @property
    def stopped(self) -> bool:
        """A stop string came."""
        return self._scanner.stopped

    def feed(self, token_id: int) -> str:
        """What the token adds; often nothing yet."""
        if token_id in self._stop_ids:
            return ""
        self._ids.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._chars += len(text)
        return self._scanner.feed(text)

    def finish(self) -> str:
        """What was held back; bytes that make no character show as U+FFFD."""
        rest = decode_answer(self._tokenizer, self._ids)[self._chars :]
        return self._scanner.feed(rest) + self._scanner.finish()
