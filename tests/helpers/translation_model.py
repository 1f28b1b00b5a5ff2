"""A tiny random M2M100, and what transformers computes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

torch.set_num_threads(1)

SOURCE, TARGET = 10, 11  # ids of two language tags
PAD, START = 1, 2


@dataclass(frozen=True)
class ReferenceTranslator:
    """A model saved in ``directory``, with its answers in float32 by eager attention."""

    directory: Path
    model: transformers.PreTrainedModel

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def source(self, subwords: Sequence[int]) -> list[int]:
        """What the encoder reads."""
        return [SOURCE, *subwords, START]

    def text(self, length: int, seed: int = 0) -> list[int]:
        """A random source of `length` subwords."""
        rng = np.random.default_rng([seed, length])
        return [int(token) for token in rng.integers(12, self.vocab_size, length)]

    def encoded(self, subwords: Sequence[int]) -> NDArray[np.float32]:
        """The encoder's output, float32 [S, D]."""
        with torch.inference_mode():
            ids = torch.tensor([self.source(subwords)])
            return self.model.model.encoder(ids).last_hidden_state[0].numpy()

    def logits(self, subwords: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits at every position of a translation [start, tag, …]: float32 [T, C].

        One token at a time, as ``generate`` does it: in one pass the reference counts positions
        differently behind a padding token.
        """
        rows, cache = [], None
        with torch.inference_mode():
            encoded = self.model.model.encoder(torch.tensor([self.source(subwords)]))
            for token in tokens:
                result = self.model(
                    encoder_outputs=encoded,
                    decoder_input_ids=torch.tensor([[token]]),
                    cache=cache,
                    use_cache=True,
                )
                cache = result.cache
                rows.append(result.logits[0, -1].numpy())
        return np.stack(rows)

    def translate(
        self, sources: Sequence[Sequence[int]], max_new: int, num_beams: int, **options: Any
    ) -> list[list[tuple[list[int], float | None]]]:
        """(ids behind the tag, score) of each source's best hypotheses, by ``generate``.

        Several sources are padded into one batch.
        """
        rows = [self.source(source) for source in sources]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        if num_beams == 1:
            options = {k: v for k, v in options.items() if k == "no_repeat_ngram_size"}
        with torch.inference_mode():
            found = self.model.generate(
                ids,
                attention_mask=mask,
                num_beams=num_beams,
                max_new_tokens=max_new + 1,  # it counts the tag
                forced_bos_token_id=TARGET,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        each = len(found.sequences) // len(rows)
        scores = [None] * len(found.sequences) if num_beams == 1 else found.sequences_scores
        every = [
            (_unpadded(sequence.tolist()[2:]), None if score is None else float(score))
            for sequence, score in zip(found.sequences, scores, strict=True)
        ]
        return [every[i * each : (i + 1) * each] for i in range(len(rows))]


def _unpadded(ids: list[int]) -> list[int]:
    """Up to the end token, which is followed by padding only."""
    return ids[: ids.index(START) + 1] if START in ids else ids


def build(
    directory: str | Path, *, dtype: torch.dtype = torch.float32, seed: int = 8, **shapes: Any
) -> ReferenceTranslator:
    """Make a model and save it in `directory`; the same arguments always give the same weights.

    Norms and biases are random. Small embeddings under a large final norm keep translations
    varied: a tied head would else repeat the last token. Some texts end early.
    """
    config = transformers.M2M100Config(
        **{
            "vocab_size": 120,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 80,
            "max_position_embeddings": 128,
        }
        | shapes
    )
    torch.manual_seed(seed)
    model = transformers.M2M100ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "model.decoder.layer_norm.weight":
                parameter.normal_(6.0, 1.0)
            elif "norm" in name and name.endswith("weight"):
                parameter.normal_(1.0, 0.2)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
            elif "shared" in name or "lm_head" in name:
                parameter.normal_(0.0, 0.03)
            else:
                parameter.normal_(0.0, 0.15)
        model.model.shared.weight[PAD] = 0.0
        model.model.shared.weight[START] *= 2.5  # also the end token: some translations end
        for half in (model.model.encoder, model.model.decoder):  # one embedding, tied or not
            half.embed_tokens.weight.copy_(model.model.shared.weight)
    folder = Path(directory)
    model.to(dtype).save_pretrained(folder)
    again = transformers.M2M100ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return ReferenceTranslator(folder, again.eval())
