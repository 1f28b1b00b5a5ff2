"""Stop strings: find them in streamed text, and count the tokens that precede the cut.

Which stop wins does not depend on how the text is cut into pieces: it is the one that is *complete*
first, as generation ends at that character; of several that end at the same character, the longest,
so that nothing of it leaks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from atlas.detokenizer import Detokenizer
from atlas.errors import InvalidArgumentError

if TYPE_CHECKING:
    from atlas.tokenizer import Tokenizer


class StopMatcher:
    """Search streamed text for stop strings, withholding no more than must be.

    Withheld is exactly the longest suffix of the text that is a proper prefix of some stop. The
    cost is constant per character, whatever the number of stops.

    Parameters
    ----------
    stop_strings : iterable of str
        Each at least one character long. Repeats are harmless.

    Raises
    ------
    InvalidArgumentError
        If a stop is empty or no string, or if one bare string is given for the collection.

    Source
    ------
    Aho and Corasick, "Efficient string matching" (1975), algorithms 2 and 3.
    """

    def __init__(self, stop_strings: Iterable[str] = ()) -> None:
        if isinstance(stop_strings, str):
            raise InvalidArgumentError(
                f"stop_strings is the string {stop_strings!r}; give a list of strings"
            )
        # Nodes are prefixes of the stops; the root is the empty prefix.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]  # the longest stop that ends at this node
        self._fail = [0]
        for stop in stop_strings:
            self._insert(stop)
        self._link()
        self._node = 0
        self._held = ""
        self._matched: str | None = None

    def _insert(self, stop: str) -> None:
        if not isinstance(stop, str) or not stop:
            raise InvalidArgumentError(
                f"stop string {stop!r}; allowed: a string of 1 character or more"
            )
        node = 0
        for character in stop:
            child = self._next[node].get(character)
            if child is None:
                child = len(self._next)
                self._next[node][character] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._stop.append(None)
                self._fail.append(0)
            node = child
        self._stop[node] = stop

    def _link(self) -> None:
        """Point each node at the longest proper suffix of its prefix that is a prefix too."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], character)
                if self._stop[child] is None:
                    self._stop[child] = self._stop[self._fail[child]]
                queue.append(child)

    def _step(self, node: int, character: str) -> int:
        while True:
            child = self._next[node].get(character)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self._fail[node]

    @property
    def matched(self) -> str | None:
        """The stop that ended the text, or None."""
        return self._matched

    @property
    def has_stops(self) -> bool:
        """Whether there is anything to search for."""
        return len(self._next) > 1

    @property
    def num_held(self) -> int:
        """Characters withheld because they may become a stop."""
        return len(self._held)

    def push(self, piece: str) -> tuple[str, str | None]:
        """Take the next piece of text.

        Returns
        -------
        text : str
            What is now certain to precede every stop.
        stop : str or None
            The stop that was found. From then on each call returns ``("", stop)``.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._node and self._next[0].keys().isdisjoint(piece):
            return piece, None  # nothing is withheld, and no stop begins here
        text = self._held + piece
        node = self._node
        for offset, character in enumerate(piece, start=len(self._held) + 1):
            node = self._step(node, character)
            stop = self._stop[node]
            if stop is not None:
                self._matched = stop
                self._held = ""
                return text[: offset - len(stop)], stop
        self._node = node
        cut = len(text) - self._depth[node]
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """End the text: return what is withheld (nothing after a match)."""
        rest, self._held, self._node = self._held, "", 0
        return rest


class TextDelta(NamedTuple):
    """What one token added to the text.

    Attributes
    ----------
    text : str
        New text, certain to stay.
    num_tokens_final : int
        How many leading token ids have all their text given out so far.
    stop : str or None
        The stop string that ended the text.
    """

    text: str
    num_tokens_final: int
    stop: str | None = None


class TextStream:
    """Token ids in, text out, ended by stop strings, with the ids that the text accounts for.

    A token belongs to the text if every character that it contributes to was given out: a token
    that ends exactly at the cut stays, one that reaches past it does not. Tokens without text
    (special tokens that are skipped) go with the text before them.

    Parameters
    ----------
    tokenizer : Tokenizer
    stops : iterable of str
    include_stop : bool
        Keep the stop string at the end of the text (and the tokens that end within it).
    skip_special, continues, vocab_size
        As in `Detokenizer`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Iterable[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        continues: bool = False,
        vocab_size: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=skip_special, continues=continues, vocab_size=vocab_size
        )
        self._matcher = StopMatcher(stops)
        self._include_stop = include_stop
        self._num_decoded = 0  # characters
        self._num_emitted = 0  # characters
        self._num_final = 0  # tokens
        self._ends: deque[int] = deque()  # where the text of each token that is not final ends

    @property
    def num_tokens_final(self) -> int:
        """How many leading token ids have all their text given out so far."""
        return self._num_final

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matcher.matched

    def watch(self, stops: Iterable[str]) -> None:
        """Replace the stops: from now on these end the text. Text so far cannot match them."""
        if self._matcher.num_held:
            raise InvalidArgumentError("text is withheld for the present stops; flush it first")
        self._matcher = StopMatcher(stops)

    def push(self, token_id: int) -> TextDelta:
        """Take one token. After a stop was found, tokens are dropped.

        Raises
        ------
        TokenizerError
            If the id is not in the vocabulary; nothing is changed.
        """
        if self.stop is not None:
            return TextDelta("", self._num_final, self.stop)
        piece = self._detokenizer.push(token_id)
        self._num_decoded += len(piece)
        if not (self._matcher.has_stops or self._ends or self._detokenizer.num_pending_bytes):
            self._num_emitted = self._num_decoded
            self._num_final += 1
            return TextDelta(piece, self._num_final)
        # Bytes that are held become exactly one character, whatever follows them.
        self._ends.append(self._num_decoded + (self._detokenizer.num_pending_bytes > 0))
        return self._emit(*self._matcher.push(piece))

    def extend(self, token_ids: list[int]) -> str:
        """:meth:`push` each of these tokens; the text that they give out together."""
        whole = None if self._matcher.has_stops else self._detokenizer.extend(token_ids)
        if whole is None:
            return "".join([self.push(token_id).text for token_id in token_ids])
        self._num_decoded += len(whole)
        self._num_emitted = self._num_decoded
        self._num_final += len(self._ends) + len(token_ids)
        self._ends.clear()
        return whole

    def finish(self) -> TextDelta:
        """End the text: release what is withheld. After a stop there is nothing to release."""
        if self.stop is not None:
            return TextDelta("", self._num_final, self.stop)
        piece = self._detokenizer.flush()
        self._num_decoded += len(piece)
        text, stop = self._matcher.push(piece)
        if stop is None:
            text += self._matcher.flush()
        return self._emit(text, stop)

    def _emit(self, text: str, stop: str | None) -> TextDelta:
        if stop is not None and self._include_stop:
            text += stop
        self._num_emitted += len(text)
        while self._ends and self._ends[0] <= self._num_emitted:
            self._ends.popleft()
            self._num_final += 1
        return TextDelta(text, self._num_final, stop)
