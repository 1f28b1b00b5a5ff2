"""Which rows of a step's prompts have logits, and where padding puts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atlas.backends.cuda.inputs import InputRegion
from atlas.layers.step import StepShape, first_rows_with_logits

PROMPTS = st.lists(
    st.integers(0, 40).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(0, rows))),
    max_size=9,
)
"""Rows of each prompt, and how many of the last have logits."""


@given(step_logits=st.integers(0, 5), prompts=PROMPTS)
def test_the_first_row_of_a_prompt_that_has_logits(
    step_logits: int, prompts: list[tuple[int, int]]
) -> None:
    ends = np.cumsum([0, *(rows for rows, _ in prompts)]).astype(np.int32)
    of_steps = range(-step_logits, 0)  # rows before the prompts'
    of_prompts = [
        row
        for end, (_, wanted) in zip(ends[1:], prompts, strict=True)
        for row in range(end - wanted, end)
    ]
    out = np.full(len(prompts), -1, np.int32)
    first_rows_with_logits(np.array([*of_steps, *of_prompts], np.int32), ends, out=out)
    assert out.tolist() == [
        end - wanted for end, (_, wanted) in zip(ends[1:], prompts, strict=True)
    ]


def test_padding_behind_prompts_has_no_rows() -> None:
    names = (
        "token_ids positions slots kept_rows cu_rows prompt_cu_rows prompt_first_rows state_slots"
        " logits_rows"
    )
    arrays: Any = SimpleNamespace(**{name: np.full(64, 99, np.int32) for name in names.split()})
    arrays.block_tables = np.full((64, 2), 99, np.int32)
    arrays.cu_rows[:5] = [0, 1, 2, 12, 20]
    arrays.prompt_cu_rows[:3], arrays.prompt_first_rows[:2] = [0, 10, 18], [9, 18]
    region = SimpleNamespace(arrays=arrays)
    shape = StepShape.of(20, 4, 3, 0, np.ones(2, np.int32))
    InputRegion.pad(region, shape, StepShape(34, 8, 4, 0, 4, 4, 1))  # type: ignore[arg-type]
    assert arrays.prompt_cu_rows[:5].tolist() == [0, 10, 18, 18, 18]
    assert arrays.prompt_first_rows[:4].tolist() == [9, 18, 18, 18]
