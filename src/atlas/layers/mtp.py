"""The multi-token prediction head: guesses the token after the next one."""

from __future__ import annotations

from dataclasses import dataclass

from atlas.layers.linear import Projection
from atlas.layers.network import Block
from atlas.layers.step import Array


@dataclass(frozen=True, slots=True, eq=False)
class MtpHead:
    """Weights of the head, loaded with the model; drafting runs it, the model's forward does not.

    Row i reads [norm(embedding of token i + 1); norm(hidden row i)] through ``inputs``, then
    ``blocks``, ``final_norm`` and the model's own head. Attention blocks have pools of no blocks.

    Source: DeepSeek-AI, "DeepSeek-V3" (2024), arXiv 2412.19437, section 2.2.
    """

    embedding_norm: Array
    hidden_norm: Array
    inputs: Projection
    blocks: tuple[Block, ...]
    final_norm: Array
