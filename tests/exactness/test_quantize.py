"""Weights quantised while loading are the weights of a file quantised before."""

from __future__ import annotations

import pytest

from tests.exactness.serial import Case, assert_continues, bits, rows, sequence, text
from tests.helpers.random_model import random_model


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
@pytest.mark.parametrize("config", ["dense_wide", "gemma_wide", "moe_wide"])
def test_quantised_at_load_equals_quantised_in_the_file(config: str, format: str) -> None:
    case = Case(config, format)
    with random_model(config, "f32", quantize=format, threads=2) as loaded:
        model = loaded.model
        with sequence(model) as seq:
            view = model.forward.prefill(text(0)[:20], seq)
            assert bits(view) == rows(case, 0, 20)[19]
            assert_continues(case, model, 0, seq, 4)
        matrices = {f for name, f in loaded.formats.items() if name.endswith("_proj")}
        assert matrices == {format}
