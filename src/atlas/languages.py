"""The languages of a translation model: codes, and the token ids of their tags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from atlas.errors import InvalidArgumentError, ModelFileError

if TYPE_CHECKING:
    from atlas.tokenizer import Tokenizer

# NLLB names a language and its script (eng_Latn); M2M100 writes __en__ for the language en.
_NLLB_TAG = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
_M2M_TAG = re.compile(r"__([a-z]{2,3})__")


class Languages:
    """A table of codes; made by :meth:`from_tokenizer`.

    Parameters
    ----------
    tags : mapping of str to int
        Code → token id.
    """

    def __init__(self, tags: Mapping[str, int]) -> None:
        self._tags = dict(sorted(tags.items()))
        self._codes = {token_id: code for code, token_id in self._tags.items()}

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, vocab_size: int) -> Languages:
        """The tags among a tokenizer's control tokens; none of them may be there.

        Raises
        ------
        ModelFileError
            A tag's id is outside the model's vocabulary.
        """
        tags: dict[str, int] = {}
        for text, token in tokenizer.control_tokens.items():
            code = _code_of(text)
            if code is None:
                continue
            if not 0 <= token.token_id < vocab_size:
                raise ModelFileError(
                    f"the tokenizer's language {text} has the id {token.token_id}; the model's "
                    f"vocabulary ends at {vocab_size - 1}"
                )
            tags[code] = token.token_id
        return cls(tags)

    @property
    def codes(self) -> tuple[str, ...]:
        """Every code, sorted."""
        return tuple(self._tags)

    def token_id(self, code: str) -> int:
        """The token id of a language's tag.

        Raises
        ------
        InvalidArgumentError
            No such language; the message has the nearest codes.
        """
        if code in self._tags:
            return self._tags[code]
        if not self._tags:
            raise InvalidArgumentError(
                f"language {code[:64]!r}: this model's tokenizer names no languages; "
                "allowed: a tag's token id"
            )
        near = difflib.get_close_matches(code[:64], self._tags, n=3, cutoff=0.0)
        raise InvalidArgumentError(
            f"language {code[:64]!r} is not one of the model's {len(self._tags)}; "
            f"nearest: {', '.join(near)}"
        )

    def code(self, token_id: int) -> str | None:
        """The code of a tag's token id; None for other tokens."""
        return self._codes.get(token_id)

    def __len__(self) -> int:
        return len(self._tags)

    def __repr__(self) -> str:
        return f"Languages({len(self)}: {', '.join(self.codes[:3])} …)"


def _code_of(text: str) -> str | None:
    if _NLLB_TAG.fullmatch(text):
        return text
    found = _M2M_TAG.fullmatch(text)
    return found.group(1) if found else None
