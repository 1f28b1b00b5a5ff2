"""From a checkpoint's canonical weights to a network, one layer after the other.

Each weight is repacked for the backend and its pages of the file are dropped at once, so that the
peak is the packed weights plus a few rows. Weights that another model holds are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from atlas.architectures.weight_names import is_sensitive
from atlas.backends.backend import Runtime
from atlas.cache.kv import BLOCK_SIZE, KvPools
from atlas.cache.recurrent import RecurrentPools
from atlas.config import LayerKind, ModelConfig
from atlas.errors import InvalidArgumentError
from atlas.layers.attention import Attention
from atlas.layers.gated_delta import GatedDelta
from atlas.layers.linear import Projection
from atlas.layers.mamba2 import Mamba2
from atlas.layers.mlp import Mlp
from atlas.layers.moe import Latent, Moe, SharedExpert
from atlas.layers.mtp import MtpHead
from atlas.layers.network import Block, FinalNorm, Network
from atlas.layers.rope import no_rotation, rope_table
from atlas.layers.step import SHARED_SCORES, Array
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
    recurrent : RecurrentPools, optional
        Of a model with recurrent layers.
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
        Quantise the file's float matrices, those that ``is_sensitive`` names excepted.
    on_progress : callable, optional
        Called with the file's bytes of each weight just loaded, or found in memory.
    """

    checkpoint: Checkpoint
    pools: KvPools
    recurrent: RecurrentPools | None
    runtime: Runtime
    weights: PackedWeights
    max_seq_len: int
    joins_shared: bool = False
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
            for kind in config.layer_blocks(i):
                blocks.append(self._block(config, kind, i, tables))
        head = embedding if config.tie_embeddings else self._packed(["head"])
        return Network(
            weights=self.weights,
            embedding=embedding,
            embedding_scale=config.embedding_scale,
            blocks=tuple(blocks),
            final_norm=FinalNorm(self._vector("final_norm"), config.norm_eps),
            head=Projection((head,)),
            final_softcap=config.final_softcap,
            mtp=self._mtp(config, tables) if config.mtp_kinds else None,
        )

    def _block(
        self, config: ModelConfig, kind: LayerKind, i: int, tables: dict[bool, Array]
    ) -> Block:
        prefix = f"layers.{i}."
        if kind == "attention":
            window = config.windows[i]
            place = config.attention_layers.index(i)
            pools = self.pools.keys[place], self.pools.values[place]
            return self._attention(config, prefix, tables[window is not None], window, pools)
        if kind == "gated_delta":
            return self._gated_delta(config, i)
        if kind == "mamba2":
            return self._mamba2(config, i)
        return self._moe(config, prefix) if kind == "moe" else self._mlp(config, prefix)

    def _mtp(self, config: ModelConfig, tables: dict[bool, Array]) -> MtpHead:
        norms = [self._vector(f"mtp.{name}_norm") for name in ("embedding", "hidden")]
        inputs = self._projection(["mtp.in_proj"], None)
        blocks: list[Block] = []
        nothing = np.empty((0, config.num_kv_heads, config.head_dim, BLOCK_SIZE), np.float32)
        pools = (nothing, nothing.swapaxes(2, 3))
        if self.pools.keys:
            pools = (self.pools.keys[0][:0], self.pools.values[0][:0])
        for i in range(len(config.mtp_kinds)):
            prefix = f"mtp.layers.{i}."
            for kind in config.mtp_blocks(i):
                if kind == "attention":
                    block: Block = self._attention(config, prefix, tables[False], None, pools)
                elif kind == "moe":
                    block = self._moe(config, prefix)
                else:
                    block = self._mlp(config, prefix)
                blocks.append(block)
        return MtpHead(norms[0], norms[1], inputs, tuple(blocks), self._vector("mtp.final_norm"))

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
        if not config.rotary:
            none = self.runtime.place(no_rotation(self.max_seq_len))
            return {False: none, True: none}
        plain = rope_table(config.rope, config.head_dim, self.max_seq_len)
        plain = self.runtime.place(plain)
        if config.rope_local is None:
            return {False: plain, True: plain}
        local = rope_table(config.rope_local, config.head_dim, self.max_seq_len)
        return {False: plain, True: self.runtime.place(local)}

    def _attention(
        self,
        config: ModelConfig,
        prefix: str,
        table: Array,
        window: int | None,
        pools: tuple[Array, Array],
    ) -> Attention:
        parts = ["q", "k", "v", "q_gate"] if config.attention_gate else ["q", "k", "v"]
        qkv_bias = None
        if config.qkv_bias:
            qkv_bias = self._vectors([f"{prefix}{name}_bias" for name in parts])
        return Attention(
            norm=self._vector(prefix + "attention_norm"),
            qkv=self._projection([f"{prefix}{name}_proj" for name in parts], qkv_bias),
            output=self._projection(
                [prefix + "o_proj"], self._vector(prefix + "o_bias") if config.output_bias else None
            ),
            rope_table=table,
            k_pool=pools[0],
            v_pool=pools[1],
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            norm_eps=config.norm_eps,
            window=window,
            softcap=config.attention_softcap,
            q_norm=self._vector(prefix + "q_norm") if config.qk_norm else None,
            k_norm=self._vector(prefix + "k_norm") if config.qk_norm else None,
            post_norm=self._vector(prefix + "post_attention_norm") if config.post_norms else None,
            is_gated=config.attention_gate,
        )

    def _gated_delta(self, config: ModelConfig, i: int) -> GatedDelta:
        assert config.gated_delta is not None
        prefix = f"layers.{i}."
        inputs = [f"{prefix}delta.{name}_proj" for name in "qkvzba"]
        return GatedDelta(
            norm=self._vector(prefix + "mixer_norm"),
            inputs=self._projection(inputs, None),
            conv_weight=self._taps(prefix + "delta.conv", config.gated_delta.conv_size),
            decay_log=self._vector(prefix + "delta.decay_log"),
            dt_bias=self._vector(prefix + "delta.dt_bias"),
            gated_norm=self._vector(prefix + "delta.gated_norm"),
            output=self._projection([prefix + "delta.out_proj"], None),
            sizes=config.gated_delta,
            norm_eps=config.norm_eps,
            **self._recurrent_pools(config, i),
        )

    def _mamba2(self, config: ModelConfig, i: int) -> Mamba2:
        assert config.mamba2 is not None
        prefix, sizes = f"layers.{i}.mamba.", config.mamba2
        biases = {
            name: self._vector(prefix + name) if sizes.projection_bias else None
            for name in ("in_bias", "out_bias")
        }
        return Mamba2(
            norm=self._vector(f"layers.{i}.mixer_norm"),
            inputs=self._projection([prefix + "in_proj"], biases["in_bias"]),
            conv_weight=self._taps(prefix + "conv", sizes.conv_size),
            conv_bias=self._vector(prefix + "conv_bias") if sizes.conv_bias else None,
            decay_log=self._vector(prefix + "decay_log"),
            d=self._vector(prefix + "d"),
            dt_bias=self._vector(prefix + "dt_bias"),
            gated_norm=self._vector(prefix + "gated_norm"),
            output=self._projection([prefix + "out_proj"], biases["out_bias"]),
            sizes=sizes,
            norm_eps=config.norm_eps,
            **self._recurrent_pools(config, i),
        )

    def _recurrent_pools(self, config: ModelConfig, i: int) -> dict[str, Array]:
        assert self.recurrent is not None
        place = config.recurrent_layers.index(i)
        return {
            "states": self.recurrent.states[place],
            "tails": self.recurrent.tails[place],
            "kept_inputs": self.recurrent.kept_inputs[place],
        }

    def _mlp(self, config: ModelConfig, prefix: str) -> Mlp:
        gate_up_bias = down_bias = None
        if config.mlp_bias:
            names = ("gate_bias", "up_bias") if config.has_mlp_gate else ("up_bias",)
            gate_up_bias = self._vectors([prefix + name for name in names])
            down_bias = self._vector(prefix + "down_bias")
        return Mlp(
            norm=self._vector(prefix + "mlp_norm"),
            gate_up=self._projection(self._widening(config, prefix), gate_up_bias),
            down=self._projection([prefix + "down_proj"], down_bias),
            activation=config.activation,
            norm_eps=config.norm_eps,
            post_norm=self._vector(prefix + "post_mlp_norm") if config.post_norms else None,
        )

    def _moe(self, config: ModelConfig, prefix: str) -> Moe:
        assert config.moe is not None
        moe = config.moe
        shared = latent = None
        norm = self._vector(prefix + "mlp_norm")
        joins = self.joins_shared
        if joins:
            names = [prefix + "router", prefix + "shared.router"]
            router = Projection((self._packed(names, zero_rows=SHARED_SCORES - 1),))
        else:
            router = self._projection([prefix + "router"], None)
        bias = self._vector(prefix + "router_bias") if moe.selection_bias else None
        gate_up = self._packed(self._widening(config, prefix + "experts."), moe.num_experts)
        down = self._packed([prefix + "experts.down_proj"], moe.num_experts)
        if moe.shared_size:
            shared = SharedExpert(
                gate_up=self._projection(self._widening(config, prefix + "shared."), None),
                down=self._projection([prefix + "shared.down_proj"], None),
                router=self._projection([prefix + "shared.router"], None)
                if moe.shared_gate and not joins
                else None,
                joins=joins,
            )
        if moe.latent_size:
            latent = Latent(
                inward=self._projection([prefix + "latent.in_proj"], None),
                outward=self._projection([prefix + "latent.out_proj"], None),
            )
        return Moe(
            norm=norm,
            router=router,
            router_bias=bias,
            gate_up=gate_up,
            down=down,
            activation=config.activation,
            sizes=moe,
            norm_eps=config.norm_eps,
            shared=shared,
            latent=latent,
        )

    def _widening(self, config: ModelConfig, prefix: str) -> list[str]:
        """Names of a feed-forward's first projections."""
        names = ("gate_proj", "up_proj") if config.has_mlp_gate else ("up_proj",)
        return [prefix + name for name in names]

    def _projection(self, names: list[str], bias: Array | None) -> Projection:
        """Stack neighbours of one format into one matrix."""
        stored = self.checkpoint.weight_formats()

        def same(first: str, second: str) -> bool:
            quantised_alike = is_sensitive(first) == is_sensitive(second)
            return stored[first] == stored[second] and (quantised_alike or not self.quantize)

        runs: list[list[str]] = []
        for name in names:
            if runs and same(runs[-1][0], name):
                runs[-1].append(name)
            else:
                runs.append([name])
        return Projection(tuple(self._packed(run) for run in runs), bias)

    def _packed(self, names: list[str], groups: int = 1, zero_rows: int = 0) -> Any:
        """The matrices, one under the other, and rows of zeros behind them."""
        held = self.weights.matrices
        key = tuple(names)
        if key not in held:
            matrices = [self._matrix(name) for name in names]
            if len({matrix.format for matrix in matrices}) > 1:  # experts of mixed formats
                matrices = [_as_f32(matrix) for matrix in matrices]
            if zero_rows:
                matrices = [_as_f32(m) if FORMATS[m.format].is_quantized else m for m in matrices]
                matrices.append(_zeros_like(matrices[0], zero_rows))
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
        if self.quantize is not None and is_float and not is_sensitive(name):
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

    def _taps(self, name: str, channels: int) -> Array:
        """A convolution's taps [W, C], the oldest input's first."""
        held, taps = self.weights.vectors, self._host_vector(name)
        if taps.ndim == 1:  # else another model has turned them
            taps = held[name] = np.ascontiguousarray(taps.reshape(channels, -1).T)
        placed: Array = self.runtime.place(taps)
        return placed

    def _report(self, name: str) -> None:
        if self.on_progress is not None:
            self.on_progress(self.checkpoint.stored_bytes(name))


def _zeros_like(matrix: HostMatrix, rows: int) -> HostMatrix:
    """A matrix of the same float format and width."""
    data = np.zeros((rows, *matrix.data.shape[1:]), matrix.data.dtype)
    return HostMatrix(matrix.format, rows, matrix.cols, data)


def _as_f32(matrix: HostMatrix) -> HostMatrix:
    if matrix.format == "f32":
        return matrix
    return HostMatrix("f32", matrix.rows, matrix.cols, dequantize(matrix))
