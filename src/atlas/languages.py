"""The languages of a translation model: codes, the token ids of their tags, and where these stand.

A tokenizer knows its languages as control tokens. A Hugging Face folder names them a second time,
in its configuration; the two must agree, else a source would begin with a wrong or unknown token.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.errors import InvalidArgumentError, ModelFileError
from atlas.tokenizer_folder import extra_special, read_optional

if TYPE_CHECKING:
    from atlas.tokenizer import Tokenizer

# NLLB names a language and its script (eng_Latn); M2M100 writes __en__ for the language en.
_NLLB_TAG = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")
_M2M_TAG = re.compile(r"__([a-z]{2,3})__")


class Languages:
    """A table of codes; made by :meth:`from_folder`.

    Parameters
    ----------
    tags : mapping of str to int
        Code → token id.
    tag_last : bool
        A source's tag stands behind its end token, as the first NLLB code had it
        (``legacy_behaviour``); else before the text.
    """

    def __init__(self, tags: Mapping[str, int], *, tag_last: bool = False) -> None:
        self._tags = dict(sorted(tags.items()))
        self._codes = {token_id: code for code, token_id in self._tags.items()}
        self.tag_last = tag_last

    @classmethod
    def from_folder(
        cls, folder: Path, tokenizer: Tokenizer, vocab_size: int, reserved: Collection[int] = ()
    ) -> Languages:
        """The tags among a tokenizer's control tokens, checked against its folder's configuration.

        Parameters
        ----------
        folder : Path
            Where ``tokenizer_config.json`` and ``special_tokens_map.json`` may lie.
        tokenizer : Tokenizer
        vocab_size : int
            Of the model.
        reserved : collection of int
            The model's start, end and padding tokens, which are no tags.

        Raises
        ------
        ModelFileError
            A language that the configuration lists is not in the vocabulary or has another id
            there; or a tag's id is outside the model's vocabulary or means something else.
        TokenizerError
            The configuration cannot be read.
        """
        config = read_optional(folder / "special_tokens_map.json")
        config |= read_optional(folder / "tokenizer_config.json")
        tags = cls._tags_of(tokenizer, vocab_size, reserved)
        _require_agreement(config, tags, tokenizer)
        tag_last = config.get("legacy_behaviour", False)
        if type(tag_last) is not bool:
            raise ModelFileError(
                f"tokenizer_config.json: legacy_behaviour is {tag_last!r}; allowed: true, false"
            )
        return cls(tags, tag_last=tag_last)

    @staticmethod
    def _tags_of(
        tokenizer: Tokenizer, vocab_size: int, reserved: Collection[int]
    ) -> dict[str, int]:
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
            if token.token_id in reserved:
                raise ModelFileError(
                    f"the tokenizer's language {text} has the id {token.token_id}, which is the "
                    "model's start, end or padding token"
                )
            tags[code] = token.token_id
        return tags

    @property
    def codes(self) -> tuple[str, ...]:
        """Every code, sorted."""
        return tuple(self._tags)

    @property
    def token_ids(self) -> frozenset[int] | None:
        """Every tag's id; None without a language, where only the caller knows them."""
        return frozenset(self._codes) or None

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


def _require_agreement(
    config: Mapping[str, Any], tags: Mapping[str, int], tokenizer: Tokenizer
) -> None:
    """Raise where the configuration's languages are not those of the vocabulary."""
    for listed in sorted(extra_special(config)):
        code = _code_of(listed)
        if code is not None and code not in tags:
            raise ModelFileError(
                f"tokenizer_config.json lists the language {listed}, which is no special token of "
                f"tokenizer.json's vocabulary ({len(tags)} languages)"
            )
    table = config.get("added_tokens_decoder") or {}
    if not isinstance(table, Mapping):
        raise ModelFileError("tokenizer_config.json: added_tokens_decoder is no object")
    for key, entry in table.items():
        text = entry.get("content") if isinstance(entry, Mapping) else entry
        if not isinstance(text, str) or _code_of(text) is None:
            continue
        found = tokenizer.token_to_id(text)
        if str(found) != key:
            raise ModelFileError(
                f"tokenizer_config.json gives the language {text} the id {key[:64]}; "
                f"tokenizer.json: {'none' if found is None else found}"
            )


def _code_of(text: str) -> str | None:
    if _NLLB_TAG.fullmatch(text):
        return text
    found = _M2M_TAG.fullmatch(text)
    return found.group(1) if found else None
