"""A pre-norm Transformer encoder and decoder with biased LayerNorm and plain MLPs.

Source
------
Vaswani et al., "Attention Is All You Need" (2017), arXiv 1706.03762; the norms before each block
are those of Fan et al., arXiv 2010.11125.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from atlas.layers.linear import Projection
from atlas.layers.step import Array
from atlas.layers.translation_step import TranslationBuffers


class TranslationBlock(Protocol):
    """Part of a layer: reads and adds to ``step.hidden``."""

    def forward(self, ops: Any, step: TranslationBuffers) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """(x − mean) / deviation · weight + bias."""

    weight: Array
    bias: Array
    eps: float

    def forward(self, ops: Any, x: Array, out: Array) -> None:
        """Write the rows of ``x`` [T, D], normalised, to ``out``."""
        ops.layernorm(x, self.weight, self.bias, self.eps, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Token embedding, scaled, plus the position's vector. ``table`` is the packed matrix."""

    table: Any
    scale: float
    positions: Array
    padding_id: int

    def forward(self, ops: Any, step: TranslationBuffers) -> None:
        """Write ``step.hidden``."""
        ops.embedding(step.token_ids, self.table, self.scale, out=step.hidden)
        ops.add_positions(
            step.hidden,
            step.token_ids,
            step.positions,
            self.positions,
            self.padding_id,
            out=step.hidden,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlainMlp:
    """down(relu(up(x))), added to the residual stream."""

    norm: LayerNorm
    up: Projection
    down: Projection

    def forward(self, ops: Any, step: TranslationBuffers) -> None:
        """Add the block's output to ``step.hidden``."""
        inner = step.inner[:, : self.up.matrices[0].rows]
        self.norm.forward(ops, step.hidden, step.normed)
        self.up.forward_relu(ops, step.normed, inner)
        self.down.add_to(ops, inner, step.hidden)


def heads(x: Array, num_heads: int) -> Array:
    """[T, H · K] as [T, H, K]; rows may be strided."""
    return x.reshape(len(x), num_heads, x.shape[1] // num_heads, copy=False)


def split_heads(qkv: Array, num_heads: int) -> tuple[Array, Array, Array]:
    """[T, 3D] as q, k and v [T, H, K]."""
    size = qkv.shape[1] // 3
    q, k, v = (heads(qkv[:, i * size : (i + 1) * size], num_heads) for i in range(3))
    return q, k, v


@dataclass(frozen=True, slots=True, eq=False)
class EncoderAttention:
    """Self-attention of a source: every token sees all of it."""

    norm: LayerNorm
    qkv: Projection
    output: Projection
    num_heads: int
    scale: float

    def forward(self, ops: Any, step: TranslationBuffers) -> None:
        """Add the block's output to ``step.hidden``."""
        self.norm.forward(ops, step.hidden, step.normed)
        self.qkv.forward(ops, step.normed, step.qkv)
        q, k, v = split_heads(step.qkv, self.num_heads)
        out = heads(step.attended, self.num_heads)
        ops.encoder_attention(q, k, v, step.source_cu_rows, self.scale, out=out)
        self.output.add_to(ops, step.attended, step.hidden)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderAttention:
    """Causal self-attention over a paged cache, without rotation."""

    norm: LayerNorm
    qkv: Projection
    output: Projection
    no_rotation: Array
    k_pool: Array
    v_pool: Array
    num_heads: int
    scale: float

    def forward(self, ops: Any, step: TranslationBuffers) -> None:
        """Add the block's output to ``step.hidden`` and store the rows' K and V."""
        self.norm.forward(ops, step.hidden, step.normed)
        self.qkv.forward(ops, step.normed, step.qkv)
        q, k, v = split_heads(step.qkv, self.num_heads)
        ops.attention_step(
            q,
            k,
            v,
            None,
            None,
            self.norm.eps,
            self.no_rotation,
            step.slots,
            step.block_tables,
            step.cu_rows,
            step.max_rows,
            step.positions,
            self.scale,
            None,
            None,
            k_pool=self.k_pool,
            v_pool=self.v_pool,
            out=heads(step.attended, self.num_heads),
        )
        self.output.add_to(ops, step.attended, step.hidden)


@dataclass(frozen=True, slots=True, eq=False)
class CrossAttention:
    """Attention of the decoder over its source, whose K and V the encoder's sweep stored."""

    norm: LayerNorm
    query: Projection
    kv: Projection
    output: Projection
    k_pool: Array
    v_pool: Array
    num_heads: int
    scale: float

    def store(self, ops: Any, step: TranslationBuffers, encoded: Array) -> None:
        """K and V of an encoder's output [T, D] into the blocks of its sources."""
        size = encoded.shape[1]
        kv = step.qkv[:, : 2 * size]
        self.kv.forward(ops, encoded, kv)
        k, v = heads(kv[:, :size], self.num_heads), heads(kv[:, size:], self.num_heads)
        ops.kv_store(k, v, step.slots, k_pool=self.k_pool, v_pool=self.v_pool)

    def forward(self, ops: Any, step: TranslationBuffers) -> None:
        """Add the block's output to ``step.hidden``."""
        self.norm.forward(ops, step.hidden, step.normed)
        query = step.qkv[:, : step.hidden.shape[1]]
        self.query.forward(ops, step.normed, query)
        ops.cross_attention(
            heads(query, self.num_heads),
            self.k_pool,
            self.v_pool,
            step.source_tables,
            step.source_cu_rows,
            step.max_source_rows,
            step.source_lens,
            self.scale,
            out=heads(step.attended, self.num_heads),
        )
        self.output.add_to(ops, step.attended, step.hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Sources to the keys and values that the decoder's layers look at."""

    embedding: Embedding
    blocks: tuple[TranslationBlock, ...]
    norm: LayerNorm
    readers: tuple[CrossAttention, ...]

    def forward(self, ops: Any, step: TranslationBuffers) -> None:
        """One sweep: ``step.token_ids`` to the pools; the output stays in ``step.hidden``."""
        self.embedding.forward(ops, step)
        for block in self.blocks:
            block.forward(ops, step)
        self.norm.forward(ops, step.hidden, step.hidden)
        for reader in self.readers:
            reader.store(ops, step, step.hidden)


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """Tokens to logits, over sources that were encoded."""

    embedding: Embedding
    blocks: tuple[TranslationBlock, ...]
    norm: LayerNorm
    head: Projection

    def forward(self, ops: Any, step: TranslationBuffers) -> None:
        """One sweep: ``step.token_ids`` to ``step.logits``, for the rows in ``logits_rows``."""
        self.embedding.forward(ops, step)
        for block in self.blocks:
            block.forward(ops, step)
        if not len(step.logits_rows):
            return
        if step.max_rows == 1:  # nothing to gather: each row would go where it is
            rows = step.hidden[: len(step.logits_rows)]
        else:
            rows = step.last_hidden
            ops.gather_rows(step.hidden, step.logits_rows, out=rows)
        self.norm.forward(ops, rows, step.last_hidden)
        self.head.forward(ops, step.last_hidden, step.logits)


@dataclass(frozen=True, slots=True, eq=False)
class EncoderDecoder:
    """Both halves; ``weights`` owns the arrays of all layers."""

    weights: object
    encoder: Encoder
    decoder: Decoder
