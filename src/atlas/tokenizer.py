"""Text to token ids and back, from a Hugging Face folder or from GGUF metadata.

The `tokenizers` library does the splitting and the merging of *plain* text. Control tokens are kept
out of its hands: they are matched here, and only where the caller vouches for the text
(``parse_special=True``, or a chat template's own text). Everything else is encoded with control
tokens switched off, and the library's vocabulary is arranged so that no merge, word lookup or
Viterbi path can produce one. Hence text from a user never becomes a control token.

*Control* tokens are those that the tokenizer marks special (Hugging Face) or CONTROL / UNKNOWN
(GGUF), markup (``<s>``) named as BOS, EOS and the like, and tokens of the form ``<|…|>`` or
``<｜…｜>`` even where the file forgot the mark. Other added tokens (``<think>``, spaces) are
vocabulary: text matches them, as it does in the reference tokenizers. *Special* tokens, which
``skip_special`` leaves out of decoded text, are the marked and the named ones only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from atlas.control_tokens import ControlToken, library_errors
from atlas.detokenizer import ByteScheme, TokenBytes, byte_alphabet
from atlas.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


# Bytes that occur in UTF-8 text.
_TEXT_BYTES = frozenset(range(0xF5)) - {0xC0, 0xC1}
_OTHER_TOKENIZER_FILES = (
    "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "tekken.json", "vocab.json",
    "vocab.txt", "merges.txt",
)  # fmt: skip
_M2M100_FILES = ("sentencepiece.bpe.model", "vocab.json")


@dataclass(kw_only=True, eq=False, repr=False)
class Tokenizer:
    """The tokenizer of one model; make one with `from_folder`, `from_gguf` or `load_tokenizer`.

    Attributes
    ----------
    kind : str
        For people: scheme and model.
    tokens : mapping of id to str
        The vocabulary's strings; may have holes.
    bos_token_id : int or None
    eos_token_ids : tuple of int
        Every id that ends generation, the tokenizer's own EOS first.
    special_token_ids : frozenset of int
        Ids that ``skip_special`` leaves out of decoded text.
    control_tokens : mapping of text to ControlToken
        See the module's docstring; a superset of the special tokens.
    special_tokens : mapping of str to str
        Named tokens, such as ``{"bos_token": "<s>"}``, as chat templates want them.
    chat_templates : mapping of str to str
        Jinja sources by name; the main one is ``"default"``.
    """

    kind: str
    library: Library
    # Where only the start of a text gets a space: the form for text after a control token.
    continuation: Library
    tokens: Mapping[int, str]
    bytes_of: TokenBytes
    control_tokens: Mapping[str, ControlToken]
    special_token_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    prefix_space: bool = False
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    # Control tokens that plain text may give after all: "unknown".
    unk_token_id: int | None = None

    def __post_init__(self) -> None:
        texts = sorted(self.control_tokens, key=len, reverse=True)  # so that the longest wins
        self._control_pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._control_by_id = {token.token_id: token for token in self.control_tokens.values()}
        self._forbidden = frozenset(self._control_by_id) - {self.unk_token_id}
        self._missing_bytes: frozenset[int] = frozenset()
        unk = getattr(self.library.model, "unk_token", None)
        if self.bytes_of.scheme is ByteScheme.BYTE_LEVEL and unk is None:
            # The library would drop what it cannot express.
            known = {
                b for c, b in byte_alphabet().items() if self.library.token_to_id(c) is not None
            }
            self._missing_bytes = _TEXT_BYTES - known

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` and what accompanies it in a Hugging Face folder.

        Also read, where present: ``tokenizer_config.json``, ``special_tokens_map.json``,
        ``generation_config.json``, ``chat_template.jinja``, ``additional_chat_templates/*.jinja``.

        Raises
        ------
        TokenizerError
            If a file is missing, damaged, over 256 MiB or of a kind that is not supported.
        """
        from atlas.tokenizer_folder import read_folder

        return read_folder(Path(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build the tokenizer that GGUF metadata describes.

        Parameters
        ----------
        metadata : mapping of key to value
            Arrays of numbers as NumPy arrays, of strings as lists of str (bytes that are no UTF-8
            as surrogates, PEP 383). ``tokenizer.ggml.model`` is ``gpt2`` (byte-level BPE) or
            ``llama`` (SentencePiece BPE).

        Raises
        ------
        TokenizerError
            If a key is missing, damaged or names something that is not supported.
        """
        from atlas.tokenizer_gguf import read_metadata

        return read_metadata(metadata)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id. A model's rows of logits may be longer (padding)."""
        return max(self.tokens, default=-1) + 1

    @property
    def strips_first_space(self) -> bool:
        """Decoding drops one space from the start of a text."""
        return self.bytes_of.strips_first_space

    @property
    def chat_template(self) -> str | None:
        """The main chat template's Jinja source, if the model has one."""
        return self.chat_templates.get("default")

    @cached_property
    def _ids(self) -> dict[str, int]:
        ids: dict[str, int] = {}
        for token_id, token in self.tokens.items():
            ids.setdefault(token, token_id)
        return ids

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary string (``"Ġthe"``, ``"<s>"``), or None."""
        return self._ids.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary string of an id, or None."""
        return self.tokens.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; a control token gives its literal text.

        Raises
        ------
        TokenizerError
            If the id is not in the vocabulary.
        """
        return self.bytes_of[token_id]

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Turn text into token ids.

        Parameters
        ----------
        text : str
        add_special : bool
            Add BOS and EOS as the model's own tokenizer would, but never a second time.
        parse_special : bool
            Let control tokens spelled out in the text become control tokens. For trusted text only.

        Raises
        ------
        TokenizerError
            If the text is no string, holds a lone surrogate or has no form in the vocabulary.
        """
        if not isinstance(text, str):
            raise TokenizerError(f"{type(text).__name__} cannot be encoded; allowed: str")
        ids = self.encode_pieces(self.split_control(text) if parse_special else [text])
        if not add_special:
            return ids
        has_prefix = tuple(ids[: len(self.prefix_ids)]) == self.prefix_ids
        has_suffix = tuple(ids[len(ids) - len(self.suffix_ids) :]) == self.suffix_ids
        return [
            *(() if has_prefix else self.prefix_ids),
            *ids,
            *(() if has_suffix else self.suffix_ids),
        ]

    def split_control(self, text: str) -> list[str | int]:
        """Split trusted text into plain text and the ids of control tokens (leftmost, longest)."""
        pieces: list[str | int] = []
        end = 0
        for match in self._control_pattern.finditer(text) if self._control_pattern else ():
            token = self.control_tokens[match[0]]
            around = text[match.start() - 1 : match.start()] + text[match.end() : match.end() + 1]
            if token.single_word and re.search(r"\w", around):
                continue
            pieces += [text[end : match.start()], token.token_id]
            end = match.end()
        pieces.append(text[end:])
        return [piece for piece in pieces if piece != ""]

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """Encode alternating plain text and token ids; no text can become a control token."""
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if isinstance(piece, int):
                self.bytes_of[piece]  # refuses ids outside the vocabulary
                ids.append(piece)
                continue
            text = piece
            if self._strips(pieces, index - 1, "rstrip"):
                text = text.lstrip()
            if self._strips(pieces, index + 1, "lstrip"):
                text = text.rstrip()
            ids += self._encode_plain(text, self.library if index == 0 else self.continuation)
        return ids

    def _strips(self, pieces: Sequence[str | int], index: int, side: str) -> bool:
        piece = pieces[index] if 0 <= index < len(pieces) else ""
        token = self._control_by_id.get(piece) if isinstance(piece, int) else None
        return token is not None and bool(getattr(token, side))

    def _encode_plain(self, text: str, library: Library) -> list[int]:
        try:
            data = text.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            raise TokenizerError(
                f"text cannot be encoded: {error}; allowed: Unicode text"
            ) from error
        if not data:
            return []
        if missing := self._missing_bytes.intersection(data):
            raise TokenizerError(
                f"the vocabulary has no token for byte 0x{min(missing):02X} of the text"
            )
        with library_errors("text could not be encoded"):
            encoding = library.encode(
                " " + text if self.prefix_space else text, add_special_tokens=False
            )
        if not self._forbidden.isdisjoint(encoding.ids):
            raise TokenizerError("the tokenizer file lets plain text produce control tokens")
        return list(encoding.ids)

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = False, continues: bool = False
    ) -> str:
        """Turn token ids into text, by bytes (see `atlas.detokenizer`).

        Parameters
        ----------
        ids : iterable of int
        skip_special : bool
            Leave out the text of special tokens.
        continues : bool
            The ids continue an earlier text, so a leading space is kept.

        Raises
        ------
        TokenizerError
            If an id is not in the vocabulary.
        """
        skipped = self.special_token_ids if skip_special else frozenset[int]()
        return self.bytes_of.decode((i for i in ids if i not in skipped), continues=continues)

    def __repr__(self) -> str:
        bos = None if self.bos_token_id is None else self._named(self.bos_token_id)
        eos = ", ".join(map(self._named, self.eos_token_ids))
        return f"Tokenizer({self.kind}, vocab_size={self.vocab_size}, bos={bos}, eos=[{eos}])"

    def _named(self, token_id: int) -> str:
        return f"{token_id} {self.tokens[token_id]!r}"


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """Return the tokenizer of a model folder, or None if the folder has no tokenizer files.

    Raises
    ------
    TokenizerError
        If there are tokenizer files but no usable ``tokenizer.json``.
    """
    folder = Path(folder)
    if (folder / "tokenizer.json").exists():
        return Tokenizer.from_folder(folder)
    found = [name for name in _OTHER_TOKENIZER_FILES if (folder / name).exists()]
    if set(_M2M100_FILES) <= set(found):
        raise TokenizerError(
            f"{folder} has {' and '.join(_M2M100_FILES)} but no tokenizer.json: M2M100's own form, "
            "which is not supported; allowed: tokenizer.json, or neither file and token ids"
        )
    if found:
        raise TokenizerError(
            f"{folder} has {found[0]} but no tokenizer.json, the only supported file; transformers "
            "writes it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return None
