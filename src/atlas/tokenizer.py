"""Text to token ids and back, from a Hugging Face folder or from GGUF metadata.

The `tokenizers` library does the splitting and the merging of *plain* text. Control tokens are kept
out of its hands: they are matched here, and only where the caller vouches for the text
(``parse_special=True``, or a chat template's own text). Everything else is encoded with control
tokens switched off, and the library's vocabulary is arranged so that no merge, word lookup or
Viterbi path can produce one. Hence text from a user never becomes a control token.

*Control* tokens are those that the tokenizer marks special (Hugging Face) or CONTROL / UNKNOWN
(GGUF), markup (``<s>``) named as BOS, EOS and the like, and tokens of the form ``<|…|>`` or
``<｜…｜>`` even where the file forgot the mark. Other added tokens (``<think>``, runs of spaces) are
vocabulary: text matches them, as it does in the reference tokenizers. *Special* tokens, which
``skip_special`` leaves out of decoded text, are the marked and the named ones only.
"""

from __future__ import annotations

import json
import operator
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atlas.detokenizer import SPACE_MARK, ByteScheme, TokenBytes, byte_alphabet
from atlas.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MAX_FILE_BYTES = 256 << 20
MAX_VOCAB_SIZE = 1 << 24

_CONTROL_SHAPE = re.compile(r"<\|[^<>\s]+\|>|<｜[^<>\s]+｜>")
# A file may name an ordinary word, such as "!" for padding; only what looks like markup is control.
_MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_NAMED_TOKENS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
# Bytes that occur in UTF-8 text.
_TEXT_BYTES = frozenset(range(0xF5)) - {0xC0, 0xC1}
_OTHER_TOKENIZER_FILES = (
    "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "tekken.json", "vocab.json",
    "vocab.txt", "merges.txt",
)  # fmt: skip


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
            alphabet, known = byte_alphabet(), set(self.tokens.values())
            self._missing_bytes = _TEXT_BYTES - {b for c, b in alphabet.items() if c in known}

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
        return _from_folder(Path(path))

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
        return _from_gguf(metadata)

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
        with _library_errors("text could not be encoded"):
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
    if found := [name for name in _OTHER_TOKENIZER_FILES if (folder / name).exists()]:
        raise TokenizerError(
            f"{folder} has {found[0]} but no tokenizer.json, the only supported file; transformers "
            "writes it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return None


@contextmanager
def _library_errors(what: str) -> Iterator[None]:
    """Turn the library's errors, which have no class of their own, into TokenizerError."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        # A Rust panic arrives as a BaseException whose class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {error}") from error
        raise


def _hidden_name(nonce: str, token_id: int) -> str:
    """Return a vocabulary string that no text spells, except by guessing 64 random bits."""
    return f"\0{nonce}:{token_id}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TokenizerError(f"{path} is over {MAX_FILE_BYTES >> 20} MiB")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def _read_optional(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    raw = _read_json(path)
    config = _read_optional(folder / "special_tokens_map.json")
    config |= _read_optional(folder / "tokenizer_config.json")
    generation = _read_optional(folder / "generation_config.json")
    try:
        return _from_json(raw, config, generation, _folder_templates(folder, config))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        # Whatever in a hostile file is not of the type that the format gives it.
        raise TokenizerError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _from_json(
    raw: dict[str, Any],
    config: dict[str, Any],
    generation: dict[str, Any],
    templates: dict[str, str],
) -> Tokenizer:
    scheme, strips = _decoder_scheme(raw.get("decoder"))
    tokens = _json_vocabulary(raw["model"]["vocab"])
    named = _named_tokens(config)
    added = _added_tokens(raw, tokens, {*named.values(), *_extra_special(config)})
    library, continuation = _json_libraries(raw, added)
    ids = {a["content"]: a["id"] for a in added}
    bos, eos = (_named_id(named, role, ids, tokens) for role in ("bos", "eos"))
    prefix, suffix = _json_specials(library, config, bos, eos, tokens.values())
    more_eos = generation.get("eos_token_id")
    unk = raw["model"].get("unk_token")
    return Tokenizer(
        kind=f"{scheme.value} {raw['model'].get('type', 'BPE')}",
        library=library,
        continuation=continuation,
        tokens=tokens,
        bytes_of=TokenBytes(tokens, scheme, literal_ids=ids.values(), strips_first_space=strips),
        control_tokens={a["content"]: _control_token(a) for a in added if _is_control(a)},
        special_token_ids=frozenset(a["id"] for a in added if a["special"]),
        bos_token_id=bos,
        eos_token_ids=_known_ids(
            [eos, *(more_eos if isinstance(more_eos, list) else [more_eos])], tokens, "eos_token_id"
        ),
        prefix_ids=prefix,
        suffix_ids=suffix,
        special_tokens={f"{role}_token": text for role, text in named.items() if text in ids},
        chat_templates=templates,
        unk_token_id=ids.get(unk) if unk is not None else None,
    )


def _decoder_scheme(decoder: Any) -> tuple[ByteScheme, bool]:
    """Return how the vocabulary spells bytes, and whether decoding strips a leading space."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    scheme, strips = None, False
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                scheme = ByteScheme.BYTE_LEVEL
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                scheme = ByteScheme.SENTENCEPIECE
            case {"type": "Metaspace", "replacement": "\u2581"}:
                scheme = ByteScheme.SENTENCEPIECE
                always = "always" if step.get("add_prefix_space", True) else "never"
                strips = step.get("prepend_scheme", always) != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                strips = start == 1
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise TokenizerError(
                    f"decoder {json.dumps(step)[:200]} is not supported; supported: ByteLevel, "
                    "Metaspace, Replace (U+2581 by a space), ByteFallback, Fuse, Strip (one space)"
                )
    if scheme is None:
        raise TokenizerError("the decoder says nothing of spaces: expected ByteLevel or Metaspace")
    return scheme, strips


def _json_vocabulary(vocab: Any) -> dict[int, str]:
    entries = enumerate(entry[0] for entry in vocab) if isinstance(vocab, list) else None
    tokens = dict(entries or ((token_id, token) for token, token_id in vocab.items()))
    if len(tokens) != len(vocab):
        raise TokenizerError("two tokens of the vocabulary share an id")
    for token_id, token in tokens.items():
        _check_token(token_id, token)
    return tokens


def _check_token(token_id: object, token: object) -> None:
    if type(token_id) is not int or not 0 <= token_id < MAX_VOCAB_SIZE:
        raise TokenizerError(f"token id {token_id!r}; allowed: 0 to {MAX_VOCAB_SIZE - 1}")
    if type(token) is not str:
        raise TokenizerError(f"token {token_id} is {token!r}; expected a string")


def _token_text(value: object) -> str | None:
    """Return a token named in a configuration: a string, or an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise TokenizerError(f"special token {value!r}; expected a string")
    return text


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    texts = {role: _token_text(config.get(f"{role}_token")) for role in _NAMED_TOKENS}
    return {role: text for role, text in texts.items() if text}


def _extra_special(config: dict[str, Any]) -> set[str]:
    extra = config.get("additional_special_tokens") or []
    return {text for value in extra if (text := _token_text(value))}


def _added_tokens(
    raw: dict[str, Any], tokens: dict[int, str], special: set[str]
) -> list[dict[str, Any]]:
    """Return the added tokens, completed by markup that only a configuration calls special."""
    added = [{"special": False, **a} for a in raw.get("added_tokens") or []]
    for a in added:
        _check_token(a["id"], a["content"])
        if not a["content"] or tokens.setdefault(a["id"], a["content"]) != a["content"]:
            raise TokenizerError(f"added token {a['id']} {a['content']!r}: its id or text is taken")
    missing = set(filter(_MARKUP.fullmatch, special.difference(a["content"] for a in added)))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token_id, token in tokens.items() if missing else ():
        if token in missing:
            added.append({"id": token_id, "content": token, **flags})
    return [{**a, "special": a["special"] or a["content"] in special} for a in added]


def _is_control(added: dict[str, Any]) -> bool:
    return added["special"] or _CONTROL_SHAPE.fullmatch(added["content"]) is not None


def _control_token(added: dict[str, Any]) -> ControlToken:
    sides = (bool(added.get(side)) for side in ("lstrip", "rstrip", "single_word"))
    return ControlToken(added["content"], added["id"], *sides)


def _named_id(
    named: Mapping[str, str], role: str, added: Mapping[str, int], tokens: Mapping[int, str]
) -> int | None:
    text = named.get(role)
    if text is None or text in added:
        return None if text is None else added[text]
    found = next((token_id for token_id, token in tokens.items() if token == text), None)
    if found is None:
        raise TokenizerError(f"{role}_token {text!r} is not in the vocabulary")
    return found


def _known_ids(values: Iterable[object], tokens: Mapping[int, str], name: str) -> tuple[int, ...]:
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


def _json_libraries(raw: dict[str, Any], added: list[dict[str, Any]]) -> tuple[Library, Library]:
    """Return the library's tokenizer, and its form for text that follows a control token."""
    model = raw["model"]
    if model.get("dropout"):
        raise TokenizerError(
            f"BPE dropout {model['dropout']!r} is for training; expected null or 0"
        )
    control = {a["content"]: a["id"] for a in added if _is_control(a)}
    nonce = secrets.token_hex(8)
    hidden = {
        text: _hidden_name(nonce, control[text]) for text in _reachable(model, control.keys())
    }
    listed = [
        {**a, "content": hidden.get(a["content"], a["content"]), "special": _is_control(a)}
        for a in added
    ]
    changed = {**raw, "added_tokens": listed, "model": _hide(model, hidden) if hidden else model}
    library = _load_library(changed)
    for a in listed:
        if library.token_to_id(a["content"]) != a["id"]:
            raise TokenizerError(f"added token {a['content']!r} cannot have the id {a['id']}")
    rest = _without_first(raw.get("pre_tokenizer"))
    if rest == raw.get("pre_tokenizer"):
        return library, library
    return library, _load_library({**changed, "pre_tokenizer": rest})


def _load_library(raw: dict[str, Any]) -> Library:
    from tokenizers import Tokenizer as Library

    with _library_errors("tokenizer.json is damaged"):
        library = Library.from_str(json.dumps(raw))
        # A file's batch settings are none of ours, and a huge fixed length would exhaust memory.
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True  # that is, as the plain text that they are
    return library


def _without_first(pre_tokenizer: Any) -> Any:
    """Return a pre-tokenizer that never takes its input for the start of the text."""
    if isinstance(pre_tokenizer, list):
        return [_without_first(item) for item in pre_tokenizer]
    if not isinstance(pre_tokenizer, dict):
        return pre_tokenizer
    changed = {key: _without_first(value) for key, value in pre_tokenizer.items()}
    if changed.get("prepend_scheme") == "first":
        changed["prepend_scheme"] = "never"
    return changed


def _merge_parts(merge: Any) -> list[str]:
    return merge.split(" ", 1) if isinstance(merge, str) else merge


def _reachable(model: dict[str, Any], control: Iterable[str]) -> set[str]:
    """Return the control tokens that the model itself could make of plain text."""
    vocab = model["vocab"]
    words = vocab if isinstance(vocab, dict) else {entry[0] for entry in vocab}
    present = {text for text in control if text in words}
    if not present or "merges" not in model or model.get("ignore_merges"):
        return present
    made = {"".join(_merge_parts(merge)) for merge in model["merges"]}
    return {text for text in present if len(text) == 1 or text in made}


def _hide(model: dict[str, Any], hidden: dict[str, str]) -> dict[str, Any]:
    """Return the model with some of its tokens under names that no text spells."""
    vocab, unk = model["vocab"], model.get("unk_token")
    changed = dict(model)
    if isinstance(vocab, dict):
        changed["vocab"] = {hidden.get(text, text): token_id for text, token_id in vocab.items()}
    else:
        changed["vocab"] = [[hidden.get(text, text), score] for text, score in vocab]
    if "merges" in model:
        changed["merges"] = [
            merge
            for merge in model["merges"]
            if hidden.keys().isdisjoint([*(parts := _merge_parts(merge)), "".join(parts)])
        ]
    if unk in hidden:
        changed["unk_token"] = hidden[unk]
    return changed


def _json_specials(
    library: Library,
    config: dict[str, Any],
    bos: int | None,
    eos: int | None,
    words: Iterable[str],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that go before and after a text.

    ``add_bos_token`` and ``add_eos_token`` decide where given; else the file's post-processor is
    asked what it does to a word that the vocabulary knows.
    """
    if "add_bos_token" in config or "add_eos_token" in config:
        before = (bos,) if config.get("add_bos_token") and bos is not None else ()
        after = (eos,) if config.get("add_eos_token") and eos is not None else ()
        return before, after
    for word in ("a", *islice(words, 64)):
        with _library_errors("the post-processor failed"):
            encoding = library.encode(word, add_special_tokens=True)
        mask = encoding.special_tokens_mask
        if 0 in mask:
            start, end = mask.index(0), len(mask) - mask[::-1].index(0)
            return tuple(encoding.ids[:start]), tuple(encoding.ids[end:])
    return (), ()


def _folder_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; files take precedence over the configuration."""
    found = config.get("chat_template") or {}
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    templates = {"default": found} if isinstance(found, str) else dict(found)
    paths = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").exists():
        paths["default"] = folder / "chat_template.jinja"
    for name, path in paths.items():
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error
    if bad := [name for name, source in templates.items() if not isinstance(source, str)]:
        raise TokenizerError(f"chat template {bad[0]!r} is no string")
    return templates


# Token types of tokenizer.ggml.token_type.
_UNDEFINED, _NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(7)

# Old files give no id for the token that ends a turn.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    + "|"
    + _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)
)
_TEKKEN = _CASED % ("", "", r"\p{N}")
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a value of ``tokenizer.ggml.pre`` stands for.

    Attributes
    ----------
    splits : tuple of str
        Regular expressions, each applied to the parts that the one before it left; matches and the
        text between them become parts of their own.
    ignore_merges : bool
        A part that is a token is taken whole, whatever the merges say.
    add_bos : bool
        Default of ``tokenizer.ggml.add_bos_token``.
    nfc : bool
        Text is brought to Unicode normalisation form C first.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


def _same(pre: PreTokenizer, *names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names, pre)


# The expressions are those of the models' own tokenizer.json files.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **_same(PreTokenizer((_GPT2,)), "gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4"),
    **_same(
        PreTokenizer((r"\p{N}", _GPT2)),
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    **_same(
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"),
    ),
    **_same(PreTokenizer((_LLAMA3,)), "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    **_same(PreTokenizer((_QWEN2,), nfc=True), "qwen2", "deepseek-r1-qwen"),
    **_same(PreTokenizer((_QWEN2,)), "stablelm2", "megrez", "hunyuan", "grok-2"),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **_same(PreTokenizer((_GPT4O,)), "gpt-4o", "llama4"),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    **_same(
        PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
        *("deepseek-v3", "hunyuan-dense"),
    ),
}


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


def _from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
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
    named = {i for i in roles.values() if i is not None and _MARKUP.fullmatch(strings[i])}
    special = {i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)} | named
    control = special | {i for i, text in enumerate(strings) if _CONTROL_SHAPE.fullmatch(text)}
    user_defined = {i for i, kind in enumerate(types) if kind == _USER_DEFINED} - control
    tokens = {
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
        eos_token_ids=_known_ids([eos, roles["eot"], roles["eom"], *end_of_turn], tokens, "eos"),
        prefix_ids=_flagged_id(ggml, "bos", add_bos, bos),
        suffix_ids=_flagged_id(ggml, "eos", False, eos),
        prefix_space=add_space,
        special_tokens={
            f"{role}_token": tokens[i]
            for role, i in roles.items()
            if i is not None and role in _NAMED_TOKENS
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
            names.append(_hidden_name(nonce, token_id))
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
    for merge in ggml.strings("merges"):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise TokenizerError(
                f"merge {merge!r:.80}; expected two tokens and a space between them"
            )
        if control.isdisjoint((left, right, left + right)):
            merges.append((left, right))
    with _library_errors("tokenizer.ggml is damaged"):
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
    if unk is None:
        unk = next((i for i, kind in enumerate(types) if kind == _UNKNOWN), None)
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
    with _library_errors("tokenizer.ggml is damaged"):
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

    with _library_errors("tokenizer.ggml is damaged"):
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
