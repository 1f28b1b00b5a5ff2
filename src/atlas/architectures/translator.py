"""From a checkpoint's canonical weights to an encoder and a decoder."""

from __future__ import annotations

from atlas.architectures.decoder import NetworkBuilder
from atlas.layers.encoder_decoder import (
    CrossAttention,
    Decoder,
    DecoderAttention,
    Embedding,
    Encoder,
    EncoderAttention,
    EncoderDecoder,
    LayerNorm,
    PlainMlp,
    TranslationBlock,
)
from atlas.layers.linear import Projection
from atlas.layers.positions import sinusoid_table
from atlas.layers.rope import no_rotation


class TranslatorBuilder(NetworkBuilder):
    """Loads the weights of one encoder-decoder; ``max_seq_len`` sizes the position tables."""

    def build_translator(self) -> EncoderDecoder:
        """Load every weight, in the order of the canonical names."""
        with self.weights.lock:
            return self._translator()

    def _translator(self) -> EncoderDecoder:
        config = self.checkpoint.config
        assert config.encoder is not None
        if self.quantize is not None:
            self._require_float_weights(self.quantize)
        embedding = Embedding(
            table=self._packed(["embedding"]),
            scale=config.embedding_scale,
            positions=self.runtime.place(
                sinusoid_table(
                    max(self.max_seq_len, config.encoder.max_source_len),
                    config.hidden_size,
                    config.encoder.padding_token_id,
                )
            ),
            padding_id=config.encoder.padding_token_id,
        )
        source_blocks: list[TranslationBlock] = []
        for i in range(config.encoder.num_layers):
            prefix = f"encoder_layers.{i}."
            source_blocks += [self._encoder_attention(prefix), self._plain_mlp(prefix)]
        source_norm = self._layernorm("encoder_norm")
        identity = self.runtime.place(no_rotation(self.max_seq_len))
        target_blocks: list[TranslationBlock] = []
        readers: list[CrossAttention] = []
        for i in range(config.num_layers):
            prefix = f"layers.{i}."
            target_blocks.append(
                DecoderAttention(
                    norm=self._layernorm(prefix + "attention_norm"),
                    qkv=self._biased([prefix + x for x in "qkv"]),
                    output=self._biased([prefix + "o"]),
                    no_rotation=identity,
                    k_pool=self.pools.keys[i],
                    v_pool=self.pools.values[i],
                    num_heads=config.num_heads,
                    scale=config.attention_scale,
                )
            )
            readers.append(self._cross_attention(prefix, i))
            target_blocks += [readers[-1], self._plain_mlp(prefix)]
        norm = self._layernorm("final_norm")
        head = embedding.table if config.tie_embeddings else self._packed(["head"])
        return EncoderDecoder(
            weights=self.weights,
            encoder=Encoder(embedding, tuple(source_blocks), source_norm, tuple(readers)),
            decoder=Decoder(embedding, tuple(target_blocks), norm, Projection((head,))),
        )

    def _encoder_attention(self, prefix: str) -> EncoderAttention:
        config = self.checkpoint.config
        assert config.encoder is not None
        num_heads = config.encoder.num_heads
        return EncoderAttention(
            norm=self._layernorm(prefix + "attention_norm"),
            qkv=self._biased([prefix + x for x in "qkv"]),
            output=self._biased([prefix + "o"]),
            num_heads=num_heads,
            scale=(config.hidden_size // num_heads) ** -0.5,
        )

    def _cross_attention(self, prefix: str, layer_idx: int) -> CrossAttention:
        config = self.checkpoint.config
        return CrossAttention(
            norm=self._layernorm(prefix + "cross_norm"),
            query=self._biased([prefix + "cross_q"]),
            kv=self._biased([prefix + "cross_k", prefix + "cross_v"]),
            output=self._biased([prefix + "cross_o"]),
            k_pool=self.pools.keys[layer_idx],
            v_pool=self.pools.values[layer_idx],
            num_heads=config.num_heads,
            scale=config.attention_scale,
        )

    def _plain_mlp(self, prefix: str) -> PlainMlp:
        return PlainMlp(
            norm=self._layernorm(prefix + "mlp_norm"),
            up=self._biased([prefix + "up"]),
            down=self._biased([prefix + "down"]),
        )

    def _layernorm(self, name: str) -> LayerNorm:
        eps = self.checkpoint.config.norm_eps
        return LayerNorm(self._vector(name), self._vector(f"{name}_bias"), eps)

    def _biased(self, names: list[str]) -> Projection:
        bias = self._vectors([f"{name}_bias" for name in names])
        return self._projection([f"{name}_proj" for name in names], bias)
