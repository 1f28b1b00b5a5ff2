"""From a checkpoint's canonical weights to a network, one layer after the other.

Each weight is repacked for the backend and its pages of the file are dropped at once, so that the
peak is the packed weights plus a few rows. Weights that another model holds are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from atlas.architectures.weight_names import is_sparse
from atlas.backends.backend import Runtime
from atlas.cache.kv import KvPools
from atlas.config import ModelConfig
from atlas.errors import InvalidArgumentError
from atlas.layers.attention import Attention
from atlas.layers.linear import Projection
from atlas.layers.mlp import Mlp
from atlas.layers.moe import Moe
from atlas.layers.network import Block, Network
from atlas.layers.rope import rope_table
from atlas.layers.step import Array
from atlas.ops.blocks import FORMATS, HostMatrix, dequantize, quantize
from atlas.weights.checkpoint import Checkpoint
from atlas.weights.packed_weights import PackedWeights

Quantize = Literal["q8_0", "q4_0"]


@dataclass
class NetworkBuilder:
    """Loads the weights of one model.

    Parameters
    ----------
    checkpoint : Checkpoint
    pools : KvPools
    runtime : Runtime
        ``pack(matrices, groups)`` repacks weights for the backend, ``place(values)`` puts a float32
        array where its kernels read.
    weights : PackedWeights
        What is missing in it is loaded into it.
    max_seq_len : int
        Rows of the RoPE tables.
    widen : bool
        Dequantise every matrix to float32.
    quantize : str, optional
        Quantise the file's float matrices (the routers excepted).
    on_progress : callable, optional
        Called with the file's bytes of each weight just loaded, or found in memory.
    """

    checkpoint: Checkpoint
    pools: KvPools
    runtime: Runtime
    weights: PackedWeights
    max_seq_len: int
    widen: bool = False
    quantize: Quantize | None = None
    on_progress: Callable[[int], None] | None = None

    def build(self) -> Network:
        """Load every weight, in the order of the file's layers."""
        with self.weights.lock:
            return self._network()

    def _network(self) -> Network:
        config = self.checkpoint.config
        if self.quantize is not None:
            self._require_float_weights(self.quantize)
        embedding = self._packed(["embedding"])
        tables = self._rope_tables(config)
        blocks: list[Block] = []
        for i in range(config.num_layers):
            blocks.append(self._attention(config, i, tables))
            sparse = is_sparse(config, i)
            blocks.append(self._moe(config, i) if sparse else self._mlp(config, i))
        head = embedding if config.tie_embeddings else self._packed(["head"])
        return Network(
            weights=self.weights,
            embedding=embedding,
            embedding_scale=config.embedding_scale,
            blocks=tuple(blocks),
            final_norm=self._vector("final_norm"),
            norm_eps=config.norm_eps,
            head=Projection((head,)),
            final_softcap=config.final_softcap,
        )

    def _require_float_weights(self, format: str) -> None:
        stored = {
            f for name, f in self.checkpoint.weight_formats().items() if name.endswith("_proj")
        }
        if all(FORMATS[name].is_quantized for name in stored):
            raise InvalidArgumentError(
                f"quantize is {format!r}, but the file's weights are quantised already "
                f"({', '.join(sorted(stored))}); allowed: None"
            )

    def _rope_tables(self, config: ModelConfig) -> dict[bool, Array]:
        """The table of layers without and with a window."""
        plain = rope_table(config.rope, config.head_dim, self.max_seq_len)
        plain = self.runtime.place(plain)
        if config.rope_local is None:
            return {False: plain, True: plain}
        local = rope_table(config.rope_local, config.head_dim, self.max_seq_len)
        return {False: plain, True: self.runtime.place(local)}

    def _attention(self, config: ModelConfig, i: int, tables: dict[bool, Array]) -> Attention:
        prefix = f"layers.{i}."
        qkv_bias = None
        if config.qkv_bias:
            qkv_bias = self._vectors([prefix + f"{name}_bias" for name in "qkv"])
        return Attention(
            norm=self._vector(prefix + "attention_norm"),
            qkv=self._projection([prefix + f"{name}_proj" for name in "qkv"], qkv_bias),
            output=self._projection(
                [prefix + "o_proj"], self._vector(prefix + "o_bias") if config.output_bias else None
            ),
            rope_table=tables[config.windows[i] is not None],
            k_pool=self.pools.keys[i],
            v_pool=self.pools.values[i],
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            norm_eps=config.norm_eps,
            window=config.windows[i],
            softcap=config.attention_softcap,
            q_norm=self._vector(prefix + "q_norm") if config.qk_norm else None,
            k_norm=self._vector(prefix + "k_norm") if config.qk_norm else None,
            post_norm=self._vector(prefix + "post_attention_norm") if config.post_norms else None,
        )

    def _mlp(self, config: ModelConfig, i: int) -> Mlp:
        prefix = f"layers.{i}."
        gate_up_bias = down_bias = None
        if config.mlp_bias:
            gate_up_bias = self._vectors([prefix + "gate_bias", prefix + "up_bias"])
            down_bias = self._vector(prefix + "down_bias")
        return Mlp(
            norm=self._vector(prefix + "mlp_norm"),
            gate_up=self._projection([prefix + "gate_proj", prefix + "up_proj"], gate_up_bias),
            down=self._projection([prefix + "down_proj"], down_bias),
            activation=config.activation,
            norm_eps=config.norm_eps,
            post_norm=self._vector(prefix + "post_mlp_norm") if config.post_norms else None,
        )

    def _moe(self, config: ModelConfig, i: int) -> Moe:
        assert config.moe is not None
        prefix = f"layers.{i}."
        experts = [prefix + f"experts.{name}_proj" for name in ("gate", "up", "down")]
        return Moe(
            norm=self._vector(prefix + "mlp_norm"),
            router=self._projection([prefix + "router"], None),
            gate_up=self._packed(experts[:2], config.moe.num_experts),
            down=self._packed(experts[2:], config.moe.num_experts),
            activation=config.activation,
            normalize_top_k=config.moe.normalize_top_k,
            norm_eps=config.norm_eps,
        )

    def _projection(self, names: list[str], bias: Array | None) -> Projection:
        """Stack neighbours of one format into one matrix."""
        stored = self.checkpoint.weight_formats()
        runs: list[list[str]] = []
        for name in names:
            if runs and stored[runs[-1][0]] == stored[name]:
                runs[-1].append(name)
            else:
                runs.append([name])
        return Projection(tuple(self._packed(run) for run in runs), bias)

    def _packed(self, names: list[str], groups: int = 1) -> Any:
        held = self.weights.matrices
        key = tuple(names)
        if key not in held:
            matrices = [self._matrix(name) for name in names]
            if len({matrix.format for matrix in matrices}) > 1:  # experts of mixed formats
                matrices = [_as_f32(matrix) for matrix in matrices]
            held[key] = self.runtime.pack(matrices, groups)
            for name in names:
                self.weights.formats[name] = held[key].format
                self.checkpoint.release(name)
        for name in names:
            self._report(name)
        return held[key]

    def _matrix(self, name: str) -> HostMatrix:
        matrix = self.checkpoint.matrix(name)
        if self.widen:
            return _as_f32(matrix)
        is_float = not FORMATS[matrix.format].is_quantized
        if self.quantize is not None and is_float and not name.endswith("router"):
            return quantize(matrix, self.quantize)
        return matrix

    def _vector(self, name: str) -> Array:
        """A norm's factors or a bias, where kernels read them."""
        return self._vectors([name])

    def _vectors(self, names: list[str]) -> Array:
        """Several vectors, one behind the other."""
        values = [self._host_vector(name) for name in names]
        placed: Array = self.runtime.place(
            values[0] if len(values) == 1 else np.concatenate(values)
        )
        return placed

    def _host_vector(self, name: str) -> Array:
        held = self.weights.vectors
        if name not in held:
            held[name] = np.ascontiguousarray(self.checkpoint.vector(name), np.float32)
            self.weights.formats[name] = "f32"
            self.checkpoint.release(name)
        self._report(name)
        vector: Array = held[name]
        return vector

    def _report(self, name: str) -> None:
        if self.on_progress is not None:
            self.on_progress(self.checkpoint.stored_bytes(name))


def _as_f32(matrix: HostMatrix) -> HostMatrix:
    if matrix.format == "f32":
        return matrix
    return HostMatrix("f32", matrix.rows, matrix.cols, dequantize(matrix))
