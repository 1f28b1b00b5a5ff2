"""How the families of byte-level BPE split text before they merge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
