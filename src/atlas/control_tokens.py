"""Control tokens: what counts as one, and what readers of tokenizer files share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from atlas.errors import TokenizerError

MAX_VOCAB_SIZE = 1 << 24
CONTROL_SHAPE = re.compile(r"<\|[^<>\s]+\|>|<｜[^<>\s]+｜>")
# A file may name an ordinary word, such as "!" for padding; only what looks like markup is control.
MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)
NAMED_TOKENS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that only trusted text may produce.

    Attributes
    ----------
    text : str
    token_id : int
    lstrip, rstrip : bool
        The match swallows white space on that side.
    single_word : bool
        The match may not touch a word character.
    """

    text: str
    token_id: int
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn the library's errors, which have no class of their own, into TokenizerError."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        # A Rust panic arrives as a BaseException whose class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {' '.join(str(error).split())}") from error
        raise


def hidden_name(nonce: str, token_id: int) -> str:
    """Return a vocabulary string that no text spells, except by guessing 64 random bits."""
    return f"\0{nonce}:{token_id}"


def known_ids(values: Iterable[object], tokens: Mapping[int, str], name: str) -> tuple[int, ...]:
    """Return the ids without None and repeats; each must be in the vocabulary."""
    ids: dict[int, None] = {}
    for value in values:
        if value is None:
            continue
        if type(value) is not int or value not in tokens:
            raise TokenizerError(
                f"{name} {value!r} is not in the vocabulary of {len(tokens)} tokens"
            )
        ids[value] = None
    return tuple(ids)
