"""Tokenizers from the files of a Hugging Face folder."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
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
from atlas.detokenizer import ByteScheme, TokenBytes
from atlas.errors import TokenizerError
from atlas.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MAX_FILE_BYTES = 256 << 20


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


def read_optional(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty where there is no such file."""
    return _read_json(path) if path.exists() else {}


def read_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    raw = _read_json(path)
    config = read_optional(folder / "special_tokens_map.json")
    config |= read_optional(folder / "tokenizer_config.json")
    generation = read_optional(folder / "generation_config.json")
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
    added = _added_tokens(raw, tokens, {*named.values(), *extra_special(config)})
    library, continuation = _json_libraries(raw, added)
    ids = {a["content"]: a["id"] for a in added}
    bos, eos = (_named_id(named, role, ids, tokens) for role in ("bos", "eos"))
    prefix, suffix = _json_specials(library, config, bos, eos, tokens.values())
    more_eos = generation.get("eos_token_id")
    unk = raw["model"].get("unk_id", ids.get(raw["model"].get("unk_token")))
    return Tokenizer(
        kind=f"{scheme.value} {raw['model'].get('type', 'BPE')}",
        library=library,
        continuation=continuation,
        tokens=tokens,
        bytes_of=TokenBytes(tokens, scheme, literal_ids=ids.values(), strips_first_space=strips),
        control_tokens={a["content"]: _control_token(a) for a in added if _is_control(a)},
        special_token_ids=frozenset(a["id"] for a in added if a["special"]),
        bos_token_id=bos,
        eos_token_ids=known_ids(
            [eos, *(more_eos if isinstance(more_eos, list) else [more_eos])], tokens, "eos_token_id"
        ),
        prefix_ids=prefix,
        suffix_ids=suffix,
        special_tokens={f"{role}_token": text for role, text in named.items() if text in ids},
        chat_templates=templates,
        unk_token_id=unk,
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
    texts = {role: _token_text(config.get(f"{role}_token")) for role in NAMED_TOKENS}
    return {role: text for role, text in texts.items() if text}


def extra_special(config: Mapping[str, Any]) -> set[str]:
    """Special tokens without a role; transformers 5 calls them extra, earlier ones additional."""
    texts: set[str | None] = set()
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or []
        texts.update(map(_token_text, extra.values() if isinstance(extra, Mapping) else extra))
    return {text for text in texts if text}


def _added_tokens(
    raw: dict[str, Any], tokens: dict[int, str], special: set[str]
) -> list[dict[str, Any]]:
    """Return the added tokens, completed by markup that only a configuration calls special."""
    added = [{"special": False, **a} for a in raw.get("added_tokens") or []]
    for a in added:
        _check_token(a["id"], a["content"])
        if not a["content"] or tokens.setdefault(a["id"], a["content"]) != a["content"]:
            raise TokenizerError(f"added token {a['id']} {a['content']!r}: its id or text is taken")
    missing = set(filter(MARKUP.fullmatch, special.difference(a["content"] for a in added)))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token_id, token in tokens.items() if missing else ():
        if token in missing:
            added.append({"id": token_id, "content": token, **flags})
    return [{**a, "special": a["special"] or a["content"] in special} for a in added]


def _is_control(added: dict[str, Any]) -> bool:
    return added["special"] or CONTROL_SHAPE.fullmatch(added["content"]) is not None


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


def _json_libraries(raw: dict[str, Any], added: list[dict[str, Any]]) -> tuple[Library, Library]:
    """Return the library's tokenizer, and its form for text that follows a control token."""
    model = raw["model"]
    if model.get("dropout"):
        raise TokenizerError(
            f"BPE dropout {model['dropout']!r} is for training; expected null or 0"
        )
    control = {a["content"]: a["id"] for a in added if _is_control(a)}
    nonce = secrets.token_hex(8)
    hidden = {text: hidden_name(nonce, control[text]) for text in _reachable(model, control.keys())}
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

    _check_merges(raw["model"])
    with library_errors("tokenizer.json is damaged"):
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


def _check_merges(model: dict[str, Any]) -> None:
    """Refuse merges that the library would cut in the middle of a character, and then abort.

    It drops as many bytes of a right part as the prefix has characters, whatever they are.
    """
    prefix = model.get("continuing_subword_prefix")
    if not prefix:
        return
    if not prefix.isascii():
        raise TokenizerError(f"continuing_subword_prefix is {prefix!r}; allowed: ASCII")
    for merge in model.get("merges") or ():
        _, right = _merge_parts(merge)
        if not right.startswith(prefix):
            raise TokenizerError(
                f"merge {merge!r} goes on with {right!r}; "
                f"allowed: what begins with continuing_subword_prefix {prefix!r}"
            )


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
        with library_errors("the post-processor failed"):
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
