"""The network that is trained: Qwen3.5's text model with its MTP head, in plain torch.

Modules carry the names of the checkpoint format, so ``state_dict`` is the file (tied embeddings,
hence no ``lm_head``). Unlike the reference in transformers it is made for training: the gated delta
rule runs over chunks with one small product per chunk in sequence, everything else in parallel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gated_delta import gated_delta

# The keys are those of the checkpoint's config.json.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_output_gate": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
    },
    "max_position_embeddings": 4096,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


class RMSNorm(nn.Module):
    """x / rms(x) · (1 + weight), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps)
        return y.type_as(x)


class GatedRMSNorm(nn.Module):
    """x / rms(x) · weight · silu(gate), per value head."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (y * F.silu(gate.float())).type_as(gate)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.key_dim, self.value_dim = (
            config["linear_key_head_dim"],
            config["linear_value_head_dim"],
        )
        self.key_heads = config["linear_num_key_heads"]
        self.value_heads = config["linear_num_value_heads"]
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.split = [keys, keys, values]
        channels, self.taps = 2 * keys + values, config["linear_conv_kernel_dim"]
        self.conv1d = nn.Conv1d(channels, channels, self.taps, groups=channels, bias=False)
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, self.value_heads, bias=False)
        # Decay rates log-uniform from a few tokens to a few thousand, as Mamba-2 starts them.
        dt = torch.exp(torch.empty(self.value_heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_log = nn.Parameter(torch.empty(self.value_heads).uniform_(1, 8).log())
        self.norm = GatedRMSNorm(self.value_dim, config["rms_norm_eps"])
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = F.pad(self.in_proj_qkv(x), (0, 0, self.taps - 1, 0))
        taps = self.conv1d.weight.squeeze(1).type_as(qkv)
        qkv = F.silu(sum(qkv[:, i : i + x.shape[1]] * taps[:, i] for i in range(self.taps)))
        q, k, v = qkv.split(self.split, -1)
        group = self.value_heads // self.key_heads
        q, k = (
            t.unflatten(-1, (self.key_heads, self.key_dim)).repeat_interleave(group, 2)
            for t in (q, k)
        )
        v = v.unflatten(-1, (self.value_heads, self.value_dim))
        beta = self.in_proj_b(x).float().sigmoid()
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
            out = gated_delta(q, k, v, decay.transpose(1, 2), beta.transpose(1, 2))
        z = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.value_dim))
        return self.out_proj(self.norm(out.transpose(1, 2), z).flatten(2))


class Attention(nn.Module):
    """Causal attention, per-head q/k norms, partial RoPE, output gate."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.head_dim = config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(hidden, heads * self.head_dim * 2, bias=False)  # per head q | gate
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, eps), RMSNorm(self.head_dim, eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        group = q.shape[2] // k.shape[2]
        k, v = k.transpose(1, 2), v.type_as(q)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(2))


def rotations(config: dict[str, Any], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, R] of positions 0…T−1; text has one position on all three axes."""
    rope = config["rope_parameters"]
    rotary = int(config["head_dim"] * rope["partial_rotary_factor"])
    exponents = torch.arange(0, rotary, 2, device=device, dtype=torch.float32) / rotary
    angles = torch.arange(length, device=device)[:, None] / rope["rope_theta"] ** exponents
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first R dims of [B, T, H, D], halves paired."""
    cos, sin = cos.type_as(x), sin.type_as(x)
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, kept], -1)


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], kind: str, dropout: float) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(hidden, eps)
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(config)
        self.kind, self.dropout = kind, nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        if self.kind == "linear_attention":
            mixed = self.linear_attn(normed)
        else:
            mixed = self.self_attn(normed, cos, sin)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, k, dropout) for k in config["layer_types"])
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class MTP(nn.Module):
    """Predicts token i+2 from the trunk's row i (before its final norm) and token i+1."""

    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)  # embedding first
        self.layers = nn.ModuleList([Layer(config, "full_attention", dropout)])
        self.norm = RMSNorm(hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(pair, -1))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Network(nn.Module):
    """The trunk, the tied output matrix, and the MTP head."""

    def __init__(self, config: dict[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, dropout)
        self.mtp = MTP(config, dropout)
        self.dropout = nn.Dropout(dropout)
        scale = config["initializer_range"]
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                depth = 2 * config["num_hidden_layers"]
                last = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=scale / math.sqrt(depth) if last else scale)

    def forward(
        self, tokens: Tensor, following: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden rows for the output matrix, after the final norms.

        Parameters
        ----------
        tokens
            [B, T] token ids.
        following
            [B, T], the tokens one further; given, the MTP head runs too.

        Returns
        -------
        tuple
            [B, T, D] that predict the next token, and [B, T, D] that predict the one after.
        """
        cos, sin = rotations(self.config, tokens.shape[1], tokens.device)
        embed = self.model.embed_tokens
        hidden = self.dropout(embed(tokens))
        for layer in self.model.layers:
            hidden = layer(hidden, cos, sin)
        ahead = None
        if following is not None:
            ahead = self.mtp(self.dropout(embed(following)), hidden, cos, sin)
        return self.model.norm(hidden), ahead

    def logits(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.model.embed_tokens.weight)
