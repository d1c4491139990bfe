"""Turns one token after the other into text, never showing half a character.

A token may end inside a UTF-8 sequence, and some tokenizers decode a token differently behind another one (a leading
space that is dropped at the start of a text). So each step decodes a short tail of tokens twice, without and with the
new one, and what is new in the second text is what the token added. The tokenizers library's own DecodeStream raises
on byte-fallback vocabularies when a character follows another, which is why it is not used.
"""

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"
# A UTF-8 sequence has four bytes at most, so no unfinished character spans more tokens than this.
UNFINISHED_TOKENS_LIMIT = 3


class Detokenizer:
    """Holds the tail of one answer. `decode` must give U+FFFD for bytes that are no character yet."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []  # already said; only context for the next token
        self._held: list[int] = []  # not yet said: it ends inside a character

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, often its own, sometimes nothing."""
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(INCOMPLETE) and len(self._held) <= UNFINISHED_TOKENS_LIMIT:
            return ""
        if not text:
            # A special token. Only at the very start may an empty token (a lone leading space) still matter.
            if self._before or len(self._held) > UNFINISHED_TOKENS_LIMIT:
                self._held.pop()
            return ""
        self._before, self._held = self._held, []
        return text

    def finish(self) -> str:
        """Return what was held back, without the character that the last token left unfinished."""
        text = self._new_text().rstrip(INCOMPLETE) if self._held else ""
        self._before, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._before) if self._before else ""
        return self._decode([*self._before, *self._held])[len(before) :]
