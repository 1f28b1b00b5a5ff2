"""A tiny random NLLB folder: weights of M2M100, and a tokenizer that transformers wrote."""

from __future__ import annotations

import functools
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import transformers

from tests.helpers import translation_model
from tests.helpers.translation_model import ReferenceTranslator
from tests.text.vocabularies import training_lines

transformers.logging.disable_progress_bar()

CODES = ("ace_Arab", "deu_Latn", "eng_Latn", "fra_Latn", "jpn_Jpan", "zho_Hans", "zho_Hant")
_LINES = ("Grüße aus Köln, naïve café.", "日本語のテキストです。", "Où est la gare ?") * 20


@functools.cache
def _sentencepiece_bpe() -> bytes:
    """A SentencePiece BPE with NLLB's settings: NFKC, no byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*(s for s in training_lines() if "\0" not in s), *_LINES]),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        normalization_rule_name="nmt_nfkc",
        character_coverage=0.999,
        minloglevel=2,
    )
    return model.getvalue()


def write_tokenizer(
    folder: Path, *, codes: tuple[str, ...] = CODES, **options: Any
) -> transformers.NllbTokenizer:
    """Save the tokenizer in ``folder`` as transformers does; returns transformers' own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # from another call
        (folder / name).unlink(missing_ok=True)
    source = folder / "sentencepiece.bpe.model"
    source.write_bytes(_sentencepiece_bpe())
    tokenizer = transformers.NllbTokenizer.from_pretrained(
        folder, extra_special_tokens=list(codes), src_lang="eng_Latn", **options
    )
    source.unlink()
    tokenizer.save_pretrained(folder)
    return transformers.NllbTokenizer.from_pretrained(folder, **options)


def change_json(path: Path, **changes: Any) -> None:
    """Write members of a JSON object anew; None takes one out."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@dataclass(frozen=True)
class ReferenceNllb:
    """Model and tokenizer in one folder."""

    directory: Path
    translator: ReferenceTranslator
    tokenizer: transformers.NllbTokenizer

    def translate(self, text: str, source: str, target: str, **options: Any) -> list[str]:
        """What transformers' ``generate`` gives, decoded; its ``max_new_tokens`` counts the tag."""
        self.tokenizer.src_lang = source
        found = self.translator.model.generate(
            **self.tokenizer(text, return_tensors="pt"),
            forced_bos_token_id=self.tokenizer.convert_tokens_to_ids(target),
            do_sample=False,
            **options,
        )
        return self.tokenizer.batch_decode(found, skip_special_tokens=True)


def build(folder: Path, *, seed: int = 9, **shapes: Any) -> ReferenceNllb:
    """Write model and tokenizer. This seed's translations vary and are long; those of 6 end."""
    tokenizer = write_tokenizer(folder)
    vocab_size = len(tokenizer) + 2
    translator = translation_model.build(folder, vocab_size=vocab_size, seed=seed, **shapes)
    return ReferenceNllb(folder, translator, tokenizer)
