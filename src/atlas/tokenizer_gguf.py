"""Tokenizers from GGUF metadata."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atlas.control_tokens import (
    CONTROL_SHAPE,
    MARKUP,
    MAX_VOCAB_SIZE,
    NAMED_TOKENS,
    ControlToken,
    hidden_name,
    known_ids,
    library_errors,
)
from atlas.detokenizer import SPACE_MARK, ByteScheme, TokenBytes
from atlas.errors import TokenizerError
from atlas.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from atlas.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

# Token types of tokenizer.ggml.token_type.
_UNDEFINED, _NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(7)

# Old files give no id for the token that ends a turn.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


class _Metadata:
    """Typed access to the ``tokenizer.ggml.`` keys of GGUF metadata."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def raw(self, name: str) -> object:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise TokenizerError(f"tokenizer.ggml.{name} is {value!r:.80}; expected a string")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if str(value) not in ("True", "False"):  # bool or numpy.bool
            raise TokenizerError(f"tokenizer.ggml.{name} is {value!r:.80}; expected true or false")
        return bool(value)

    def token_id(self, name: str, num_tokens: int, default: int | None = None) -> int | None:
        value = self.raw(f"{name}_token_id")
        if value is None:
            return default
        try:
            token_id = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            token_id = -1
        if not 0 <= token_id < num_tokens:
            raise TokenizerError(
                f"tokenizer.ggml.{name}_token_id is {value!r:.80}; allowed: 0 to {num_tokens - 1}"
            )
        return token_id

    def strings(self, name: str) -> list[str]:
        value = self.raw(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise TokenizerError(f"tokenizer.ggml.{name} is missing or no array of strings")
        return value

    def numbers(
        self, name: str, kind: type[int] | type[float], num_tokens: int
    ) -> list[Any] | None:
        value: Any = self.raw(name)
        if value is None:
            return None
        numbers = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(numbers, list) or not all(type(item) is kind for item in numbers):
            raise TokenizerError(f"tokenizer.ggml.{name} is no array of {kind.__name__}")
        if len(numbers) != num_tokens:
            raise TokenizerError(
                f"tokenizer.ggml.{name} has {len(numbers)} entries for {num_tokens} tokens"
            )
        return numbers


class _LibraryTokens(Mapping[int, str]):
    """Strings by id, read from the library: a second copy of a vocabulary takes megabytes.

    Parameters
    ----------
    library : tokenizers.Tokenizer
    hidden : mapping of id to str
        Tokens that have another name in the library.
    size : int
    """

    def __init__(self, library: Library, hidden: Mapping[int, str], size: int) -> None:
        self._library = library
        self._hidden = hidden
        self._size = size

    def __getitem__(self, token_id: int) -> str:
        if not 0 <= token_id < self._size:
            raise KeyError(token_id)
        if token_id in self._hidden:
            return self._hidden[token_id]
        found: str | None = self._library.id_to_token(token_id)
        if found is None:
            raise KeyError(token_id)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._size))

    def __len__(self) -> int:
        return self._size


def read_metadata(metadata: Mapping[str, object]) -> Tokenizer:
    ggml = _Metadata(metadata)
    model = ggml.text("model")
    if model not in ("gpt2", "llama"):
        raise TokenizerError(f"tokenizer.ggml.model is {model!r}; supported: gpt2, llama")
    strings = ggml.strings("tokens")
    num_tokens = len(strings)
    if not 0 < num_tokens <= MAX_VOCAB_SIZE:
        raise TokenizerError(f"{num_tokens} tokens; allowed: 1 to {MAX_VOCAB_SIZE}")
    types = ggml.numbers("token_type", int, num_tokens) or [_NORMAL] * num_tokens
    if bad := set(types).difference(range(7)):
        raise TokenizerError(f"token type {min(bad)}; allowed: 0 to 6")
    spm = model == "llama"
    roles = {
        role: ggml.token_id(gguf_name, num_tokens)
        for role, gguf_name in (
            *(("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("eom", "eom")),
            *(("unk", "unknown"), ("pad", "padding"), ("sep", "seperator"), ("mask", "mask")),
        )
    }
    if roles["unk"] is None and _UNKNOWN in types:
        roles["unk"] = types.index(_UNKNOWN)
    named = {i for i in roles.values() if i is not None and MARKUP.fullmatch(strings[i])}
    special = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)} | named
    control = special | {i for i, text in enumerate(strings) if CONTROL_SHAPE.fullmatch(text)}
    user_defined = {i for i, kind in enumerate(types) if kind == _USER_DEFINED} - control
    tokens: Mapping[int, str] = {
        i: text.replace(SPACE_MARK, " ") if spm and i in user_defined else text
        for i, text in enumerate(strings)
    }
    names = _gguf_names(tokens, types, control)
    if spm:
        add_bos, add_space = True, ggml.flag("add_space_prefix", True)
        library = _spm_library(ggml, names, types, roles["unk"])
    else:
        pre = _pre_tokenizer(ggml)
        add_bos, add_space = pre.add_bos, ggml.flag("add_space_prefix", False)
        library = _bpe_library(ggml, names, pre, {tokens[i] for i in control})
    _add_user_defined(library, (names[i] for i in sorted(user_defined)))
    hidden = {i: text for i, text in tokens.items() if text != names[i]}
    tokens = _LibraryTokens(library, hidden, num_tokens)
    bos, eos = roles["bos"], roles["eos"]
    end_of_turn = [i for i in sorted(control) if tokens[i] in _END_OF_TURN]
    return Tokenizer(
        kind="SentencePiece BPE" if spm else "byte-level BPE",
        library=library,
        continuation=library,
        tokens=tokens,
        bytes_of=TokenBytes(
            tokens,
            ByteScheme.SENTENCEPIECE if spm else ByteScheme.BYTE_LEVEL,
            literal_ids=control | user_defined,
            strips_first_space=add_space,
        ),
        control_tokens={
            tokens[i]: ControlToken(tokens[i], i) for i in sorted(control, reverse=True)
        },
        special_token_ids=frozenset(special),
        bos_token_id=bos,
        eos_token_ids=known_ids([eos, roles["eot"], roles["eom"], *end_of_turn], tokens, "eos"),
        prefix_ids=_flagged_id(ggml, "bos", add_bos, bos),
        suffix_ids=_flagged_id(ggml, "eos", False, eos),
        prefix_space=add_space,
        special_tokens={
            f"{role}_token": tokens[i]
            for role, i in roles.items()
            if i is not None and role in NAMED_TOKENS
        },
        chat_templates=_gguf_templates(metadata),
        unk_token_id=roles["unk"],
    )


def _flagged_id(ggml: _Metadata, role: str, default: bool, token_id: int | None) -> tuple[int, ...]:
    key = f"add_{role}_token"
    if not ggml.flag(key, default) or (token_id is None and ggml.raw(key) is None):
        return ()
    if token_id is None:
        raise TokenizerError(f"the file adds {role.upper()} but names no {role}_token_id")
    return (token_id,)


def _gguf_names(tokens: Mapping[int, str], types: Sequence[int], control: set[int]) -> list[str]:
    """Return the library's name of each token: its string, or one that no text spells.

    Hidden are control and unused tokens, strings that are not UTF-8, and all but the first token of
    those that share a string.
    """
    nonce = secrets.token_hex(8)
    seen: set[str] = set()
    names = []
    for token_id, text in tokens.items():
        hidden = token_id in control or types[token_id] == _UNUSED or not text or text in seen
        if hidden or not _is_utf8(text):
            names.append(hidden_name(nonce, token_id))
        else:
            names.append(text)
            seen.add(text)
    return names


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _pre_tokenizer(ggml: _Metadata) -> PreTokenizer:
    name = ggml.text("pre") or "default"  # files from before the key existed
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _bpe_library(
    ggml: _Metadata, names: list[str], pre: PreTokenizer, control: set[str]
) -> Library:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    merges = []
    same = {name: name for name in names}  # one copy of each string
    for merge in ggml.strings("merges"):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise TokenizerError(
                f"merge {merge!r:.80}; expected two tokens and a space between them"
            )
        if control.isdisjoint((left, right, left + right)):
            merges.append((same.get(left, left), same.get(right, right)))
    with library_errors("tokenizer.ggml is damaged"):
        vocab = {name: token_id for token_id, name in enumerate(names)}
        library = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
        splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        if pre.nfc:
            library.normalizer = normalizers.NFC()
    return library


def _spm_library(
    ggml: _Metadata, names: list[str], types: Sequence[int], unk: int | None
) -> Library:
    """Express SentencePiece BPE, which merges the pair whose piece scores best, as ranked merges.

    Two pairs that make the *same* piece where they overlap would be taken leftmost first by
    SentencePiece and in the order of the list here; no trained vocabulary showed a difference.
    """
    from tokenizers import Tokenizer, models, normalizers

    if ggml.raw("precompiled_charsmap") is not None or ggml.flag("remove_extra_whitespaces", False):
        raise TokenizerError(
            "SentencePiece with text normalisation is not supported; only identity"
        )
    scores = ggml.numbers("scores", float, len(names))
    if scores is None:
        raise TokenizerError("tokenizer.ggml.scores is missing")
    vocab = {name: token_id for token_id, name in enumerate(names)}
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if unk is None and not has_bytes:
        raise TokenizerError("the vocabulary has neither an unknown token nor all byte tokens")
    # Only ordinary pieces take part in merges; what one merges from must be ordinary too.
    score_of = {
        names[i]: scores[i] for i, kind in enumerate(types) if kind in (_NORMAL, _UNDEFINED)
    }
    if bad := [score for score in score_of.values() if score != score]:
        raise TokenizerError(f"tokenizer.ggml.scores holds {bad[0]}")
    ranked = [
        (-score, piece, cut)
        for piece, score in score_of.items()
        for cut in range(1, len(piece))
        if piece[:cut] in score_of and piece[cut:] in score_of
    ]
    ranked.sort()
    with library_errors("tokenizer.ggml is damaged"):
        library = Tokenizer(
            models.BPE(
                vocab,
                [(piece[:cut], piece[cut:]) for _, piece, cut in ranked],
                unk_token=None if unk is None else names[unk],
                fuse_unk=True,
                byte_fallback=has_bytes,
            )
        )
        library.normalizer = normalizers.Replace(" ", SPACE_MARK)
    return library


def _add_user_defined(library: Library, texts: Iterable[str]) -> None:
    from tokenizers import AddedToken

    with library_errors("tokenizer.ggml is damaged"):
        library.add_tokens([AddedToken(text, normalized=False, special=False) for text in texts])


def _gguf_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if key == prefix or key.startswith(prefix + "."):
            if not isinstance(value, str):
                raise TokenizerError(f"{key} is {value!r:.80}; expected a string")
            templates[key[len(prefix) + 1 :] or "default"] = value
    return templates
