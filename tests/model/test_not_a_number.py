"""A weight that is NaN shows in the logits, wherever it is: it is not clamped away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atlas.architectures import expected_weights
from atlas.model.load import LoadOptions, load_model
from atlas.ops.blocks import HostMatrix
from tests.helpers.random_model import CONFIGS, RandomCheckpoint

PROMPT = list(range(3, 23))


class Spoilt(RandomCheckpoint):
    """One weight of it holds nothing but NaN."""

    def __init__(self, name: str, weight: str) -> None:
        super().__init__(CONFIGS[name])
        self._weight = weight

    @property
    def identity(self) -> tuple[tuple[str, int, int], ...]:
        return ((f"spoilt {self._weight}", 0, 0),)

    def matrix(self, name: str) -> HostMatrix:
        good = super().matrix(name)
        if name != self._weight:
            return good
        return HostMatrix(good.format, good.rows, good.cols, np.full_like(good.data, np.nan))

    def vector(self, name: str) -> NDArray[np.float32]:
        good = super().vector(name)
        return np.full_like(good, np.nan) if name == self._weight else good


def hides_it(name: str, weight: str) -> bool:
    checkpoint: Any = Spoilt(name, weight)
    loaded = load_model(checkpoint, LoadOptions(max_seq_len=64, kv_tokens=64, threads=1))
    try:
        seq = loaded.model.lifecycle.alloc_sequence()
        view = loaded.model.forward.prefill(PROMPT, seq)
        assert view is not None
        return not np.isnan(view.numpy()).any()
    finally:
        loaded.core.close()


@pytest.mark.parametrize("name", ["gemma", "moe", "delta_moe", "mamba", "mixers"])
def test_nan_in_any_weight_reaches_the_logits(name: str) -> None:
    weights = expected_weights(CONFIGS[name])
    hidden = [weight for weight in weights if hides_it(name, weight)]
    # The bias of a router only chooses; it is in no product.
    assert [weight for weight in hidden if not weight.endswith("router_bias")] == []
