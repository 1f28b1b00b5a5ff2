"""Token ids to text: the bytes of each token, and incremental decoding.

Text is defined by bytes. Every token stands for a fixed byte string; the text of a sequence of ids
is the concatenation of those bytes, less one leading space where the tokenizer adds one when it
encodes, decoded as UTF-8. Bytes that are not valid UTF-8 become U+FFFD, one for each maximal
ill-formed part (Unicode 16, section 3.9, "U+FFFD substitution of maximal subparts").
``Tokenizer.decode`` and `Detokenizer` both follow this definition, so streamed pieces always join
to the full decode. Libraries that decode token by token differ in one respect: they may give one
U+FFFD for each invalid *byte*.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING

from atlas.errors import TokenizerError

if TYPE_CHECKING:
    from atlas.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "\u2581"  # SentencePiece's stand-in for a space


def byte_alphabet() -> dict[str, int]:
    """Return the characters that byte-level vocabularies use for the 256 bytes.

    Printable Latin-1 characters stand for themselves; the other 68 bytes are numbered, in ascending
    order, from U+0100.

    Source
    ------
    Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return alphabet


class ByteScheme(Enum):
    """How the strings of a vocabulary spell bytes."""

    BYTE_LEVEL = "byte-level"  # one character of `byte_alphabet` per byte
    SENTENCEPIECE = "SentencePiece"  # UTF-8 with U+2581 for a space; "<0xE4>" is one byte


class TokenBytes:
    """The byte string of every token of a vocabulary.

    Parameters
    ----------
    tokens : mapping of token id to token string
        May have holes. Bytes that were not UTF-8 are carried by surrogates (PEP 383).
    scheme : ByteScheme
    literal_ids : collection of int
        Tokens outside the scheme (control and user-defined tokens): their string is their text.
    strips_first_space : bool
        Encoding puts a space before the text, so decoding drops one from its start.
    """

    def __init__(
        self,
        tokens: Mapping[int, str],
        scheme: ByteScheme,
        *,
        literal_ids: Collection[int] = (),
        strips_first_space: bool = False,
    ) -> None:
        self.scheme = scheme
        self.strips_first_space = strips_first_space
        self._tokens = tokens
        self._literal_ids = frozenset(literal_ids)
        self._alphabet = byte_alphabet()
        self._cache: dict[int, bytes] = {}
        self._max_id = max(tokens, default=-1)

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of one token; TokenizerError if there is no such token."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        token = self._tokens.get(token_id)
        if token is None:
            raise TokenizerError(f"token id {token_id!r} is not in the vocabulary: {self._range()}")
        if token_id in self._literal_ids:
            return token.encode("utf-8", "surrogateescape")
        if self.scheme is ByteScheme.BYTE_LEVEL:
            values = [self._alphabet.get(character) for character in token]
            if None not in values:
                return bytes(value for value in values if value is not None)
        elif match := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        else:
            token = token.replace(SPACE_MARK, " ")
        return token.encode("utf-8", "surrogateescape")

    def _range(self) -> str:
        if self._max_id < 0:
            return "it is empty"
        holes = "" if len(self._tokens) == self._max_id + 1 else " with holes"
        return f"ids run from 0 to {self._max_id}{holes}"

    def decode(self, token_ids: Iterable[int], *, continues: bool = False) -> str:
        """Return the text of a whole sequence; see the module's definition."""
        text = b"".join(map(self.__getitem__, token_ids))
        if self.strips_first_space and not continues:
            text = text.removeprefix(b" ")
        return text.decode("utf-8", "replace")


class Detokenizer:
    """Decode a growing sequence of ids, giving out text as soon as it is certain.

    For every sequence, the pieces from `push` and the last one from `flush` join to
    ``tokenizer.decode(ids, skip_special=skip_special)``. A token's cost is proportional to its own
    bytes, never to the text so far.

    Parameters
    ----------
    tokenizer : Tokenizer
    skip_special : bool
        Leave out the text of special tokens.
    continues : bool
        The ids continue an earlier text, so a leading space is text and is kept.
    vocab_size : int
        Ids below it that the tokenizer lacks have no text: models pad their vocabulary.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        continues: bool = False,
        vocab_size: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._skipped = tokenizer.special_token_ids if skip_special else frozenset[int]()
        self._strips = tokenizer.strips_first_space and not continues
        self._at_start = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def num_pending_bytes(self) -> int:
        """Bytes held back because they may begin a character (0 to 3)."""
        return len(self._decoder.getstate()[0])

    def push(self, token_id: int) -> str:
        """Take one token and return the text that it completes, which may be empty.

        Raises
        ------
        TokenizerError
            If the id is not in the vocabulary; nothing is changed.
        """
        if token_id not in self._tokenizer.tokens and 0 <= token_id < self._vocab_size:
            return ""
        piece = self._tokenizer.token_bytes(token_id)
        if not piece or token_id in self._skipped:
            return ""
        if self._at_start:
            self._at_start = False
            if self._strips:
                piece = piece.removeprefix(b" ")
        return self._decoder.decode(piece)

    def extend(self, token_ids: list[int]) -> str | None:
        """The text of several tokens; None, and nothing taken, where they end within a character.

        Raises
        ------
        TokenizerError
            As `push`; nothing is changed.
        """
        known, skipped = self._tokenizer.tokens, self._skipped
        pieces = [
            self._tokenizer.token_bytes(token_id)
            for token_id in token_ids
            if token_id not in skipped
            and (token_id in known or not 0 <= token_id < self._vocab_size)
        ]
        whole = b"".join(pieces)
        before = self._decoder.getstate()
        if whole and self._at_start and self._strips:
            whole = whole.removeprefix(b" ")
        text = self._decoder.decode(whole)
        if self.num_pending_bytes:
            self._decoder.setstate(before)
            return None
        self._at_start = self._at_start and not any(pieces)
        return text

    def flush(self) -> str:
        """End the text: return what is held (U+FFFD for a cut character) and start afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._at_start = True
        return rest

    def copy(self) -> Detokenizer:
        """Return an independent detokenizer in the same state."""
        twin = object.__new__(Detokenizer)
        twin._tokenizer = self._tokenizer
        twin._vocab_size = self._vocab_size
        twin._skipped = self._skipped
        twin._strips = self._strips
        twin._at_start = self._at_start
        twin._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        twin._decoder.setstate(self._decoder.getstate())
        return twin
