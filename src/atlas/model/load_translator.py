"""From an encoder-decoder's weights to a :class:`Model`."""

from __future__ import annotations

from atlas.architectures.translator import TranslatorBuilder
from atlas.backends.backend import Runtime
from atlas.cache.kv import KvPools
from atlas.layers.translation_step import DecodeShape, EncodeShape
from atlas.model import Model
from atlas.model.core import Limits
from atlas.model.logits import DenseLogits
from atlas.model.streams import DenseStreams
from atlas.model.translator_core import TranslatorCore
from atlas.model.translator_forward import TranslatorForward
from atlas.model.translator_lifecycle import TranslatorLifecycle
from atlas.model.verify import DenseVerify


def load_translator(
    builder: TranslatorBuilder,
    runtime: Runtime,
    pools: KvPools,
    limits: Limits,
    buffer_shapes: dict[str, tuple[int, ...]],
    max_source_len: int,
) -> tuple[Model, TranslatorCore]:
    """Load the weights and tie the capability groups to them."""
    buffers = runtime.buffers(buffer_shapes)
    network = builder.build_translator()
    config = builder.checkpoint.config
    core = TranslatorCore(config, network, runtime, pools, buffers, limits, max_source_len)
    core.prepare(EncodeShape(max_source_len, 1), DecodeShape(1, 1, 1, 1))
    model = Model(
        config=config,
        forward=TranslatorForward(core),
        logits=DenseLogits(core),
        lifecycle=TranslatorLifecycle(core),
        streams=DenseStreams(core),
        verify=DenseVerify(core),
    )
    return model, core
