"""Tiny random models of every supported architecture, and what transformers computes with them.

The models are small but not gentle: norms and biases are random, windows are shorter than the
prompts, softcaps and RoPE scaling bite, and head sizes differ from hidden_size / num_heads, so an
engine that forgets one of them disagrees clearly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

torch.set_num_threads(1)

_SHAPES: dict[str, Any] = {
    "vocab_size": 197,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama(**options: Any) -> transformers.PreTrainedConfig:
    return transformers.LlamaConfig(**_SHAPES | options)


def _hybrid(*types: str, **options: Any) -> dict[str, Any]:
    """Shapes of a Qwen hybrid with these layer types: l for linear attention, f for full."""
    names = {"l": "linear_attention", "f": "full_attention"}
    return _SHAPES | {
        "layer_types": [names[kind] for kind in "".join(types)],
        "num_hidden_layers": len("".join(types)),
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        **options,
    }


_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 64,
}


def _mamba2(**options: Any) -> transformers.PreTrainedConfig:
    return transformers.Mamba2Config(
        vocab_size=197,
        hidden_size=48,
        num_hidden_layers=3,
        head_dim=16,
        num_heads=6,
        state_size=20,
        chunk_size=16,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )


def _nemotron_h(types: str, **options: Any) -> transformers.PreTrainedConfig:
    shapes = {name: value for name, value in _SHAPES.items() if name != "num_hidden_layers"}
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return transformers.NemotronHConfig(
        **shapes
        | {
            "layers_block_type": [names[kind] for kind in types],
            "head_dim": 24,
            "mamba_num_heads": 6,
            "mamba_head_dim": 12,
            "n_groups": 3,
            "ssm_state_size": 16,
            "chunk_size": 16,
        }
        | options
    )


def _bamba(**options: Any) -> transformers.PreTrainedConfig:
    return transformers.BambaConfig(
        **_SHAPES
        | {
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 24,
            "mamba_chunk_size": 16,
        }
        | options
    )


def _rope(rope_type: str, **options: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **options}


ARCHITECTURES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama2": lambda: _llama(num_key_value_heads=4),
    "smollm2": lambda: _llama(
        hidden_size=96, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=True
    ),
    "llama_bias": lambda: _llama(attention_bias=True, mlp_bias=True, head_dim=24),
    "llama3_rope": lambda: _llama(
        num_key_value_heads=1,
        head_dim=32,
        rope_parameters=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama_linear": lambda: _llama(rope_parameters=_rope("linear", factor=4.0)),
    "llama_yarn": lambda: _llama(
        head_dim=32,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    "mistral_window": lambda: transformers.MistralConfig(
        **_SHAPES | {"head_dim": 32, "sliding_window": 5}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_SHAPES | {"tie_word_embeddings": True}),
    "qwen2_window": lambda: transformers.Qwen2Config(
        **_SHAPES
        | {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        }
    ),
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPES | {"head_dim": 32}),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SHAPES
        | {
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        }
    ),
    "qwen3_moe_mixed": lambda: transformers.Qwen3MoeConfig(
        **_SHAPES
        | {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 64,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        }
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SHAPES
        | {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        }
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SHAPES
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 48,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 8.0,
                    "rope_theta": 1000000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(
        **_hybrid("lfl", linear_num_key_heads=1, linear_num_value_heads=3)
    ),
    "qwen3_5_tied": lambda: transformers.Qwen3_5TextConfig(
        **_hybrid(
            "llf",
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_conv_kernel_dim=2,
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters=_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=128,
                partial_rotary_factor=0.5,
                mrope_section=[3, 3, 2],
                mrope_interleaved=True,
            ),
        )
    ),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **{
            name: value
            for name, value in _hybrid(
                "lf", linear_num_key_heads=2, linear_num_value_heads=8, **_EXPERTS
            ).items()
            if name != "intermediate_size"
        }
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_hybrid(
            "llf",
            linear_num_key_heads=3,
            linear_num_value_heads=6,
            linear_conv_kernel_dim=3,
            mlp_only_layers=[1],
            **_EXPERTS,
        )
    ),
    "mamba2": lambda: _mamba2(n_groups=2, conv_kernel=3),
    "mamba2_bounded": lambda: _mamba2(
        n_groups=1,
        use_bias=True,
        use_conv_bias=False,
        time_step_limit=(0.3, 0.9),
        tie_word_embeddings=True,
    ),
    "nemotron_h": lambda: _nemotron_h(
        "M-*M", mlp_bias=True, use_bias=True, conv_kernel=3, time_step_min=0.2
    ),
    "nemotron_h_moe": lambda: _nemotron_h(
        "ME*E",
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=40,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
    ),
    "nemotron_h_latent": lambda: _nemotron_h(
        "MEM*",
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=24,
        moe_latent_size=24,
        norm_topk_prob=False,
    ),
    "bamba": _bamba,
    "bamba_biased": lambda: _bamba(
        mamba_n_groups=2,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
}

NOT_IN_GGUF = ("mamba2_bounded", "nemotron_h")
"""Models that llama.cpp's files cannot describe: no key holds the bounds of Mamba-2's step."""


@dataclass(frozen=True)
class ReferenceModel:
    """A tiny model, saved in `directory`, with its answers in float32 by eager attention.

    Every answer is computed from the whole sequence: no cache takes part.
    """

    name: str
    directory: Path
    model: transformers.PreTrainedModel

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits at every position: float32 [len(ids), vocab_size]."""
        with torch.inference_mode():
            result = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return result.numpy().astype(np.float32, copy=True)

    def greedy(self, ids: Sequence[int], num_tokens: int) -> list[int]:
        """The `num_tokens` most likely next tokens, the end of the text ignored; of equal
        logits the lowest id wins."""
        sequence = list(ids)
        for _ in range(num_tokens):
            sequence.append(int(np.argmax(self.logits(sequence)[-1])))
        return sequence[len(ids) :]

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Parameters and persistent buffers by name."""
        state = self.model.state_dict()
        tied = self.model.config.tie_word_embeddings
        return {name: t.numpy() for name, t in state.items() if not (tied and "lm_head" in name)}

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """A random prompt of `length` tokens."""
        rng = np.random.default_rng([seed, length])
        return [int(token) for token in rng.integers(3, self.vocab_size, length)]


def build(name: str, directory: str | Path) -> ReferenceModel:
    """Make the model `name` of :data:`ARCHITECTURES` and save it in `directory`.

    The same name always gives the same weights.
    """
    config = ARCHITECTURES[name]()
    torch.manual_seed(sum(name.encode()) + 4)  # + 4: no greedy text falls into a short loop
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomize(model, model.config)
    folder = Path(directory)
    model.save_pretrained(folder)
    return ReferenceModel(name, folder, model)


def randomize(model: transformers.PreTrainedModel, config: transformers.PreTrainedConfig) -> None:
    """Large weights, norms around their neutral value, biases that are not zero.

    A tied head sees the embedding of the last token in the residual stream and would repeat it
    for ever; small embeddings under a large final norm keep the text varied.
    """
    one_plus = ("gemma", "qwen3_next", "qwen3_5")
    neutral = 0.0 if config.model_type.startswith(one_plus) else 1.0
    is_tied = config.tie_word_embeddings
    final_norms = (".norm.weight", ".norm_f.weight", ".final_layernorm.weight")
    embeddings = (".embed_tokens.weight", ".embeddings.weight")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(final_norms) and ".layers." not in name and is_tied:
                parameter.normal_(neutral + 6.0, 1.0)
            elif name.endswith("linear_attn.norm.weight"):
                parameter.normal_(1.0, 0.2)
            elif "norm" in name:
                parameter.normal_(neutral, 0.2)
            elif name.endswith("A_log"):
                parameter.normal_(-1.0, 0.7)  # states that last for some tokens
            elif name.endswith((".D", "conv1d.weight", "dt_bias")):
                parameter.normal_(0.0, 0.5)
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.3)
            elif name.endswith(embeddings) and is_tied:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.normal_(0.0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
