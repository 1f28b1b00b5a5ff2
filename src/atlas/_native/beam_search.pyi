from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atlas._native.source_rows import SourceRows
from atlas.errors import AtlasError

Ints = NDArray[np.int32]

class BeamSearch:
    num_beams: int
    num_candidates: int
    num_running: int
    done: bool
    def __init__(
        self,
        first_tokens: Sequence[int],
        end_ids: Sequence[int],
        *,
        num_beams: int,
        max_new: int,
        length_penalty: float,
        early_stopping: bool | str,
        no_repeat_ngram: int,
    ) -> None: ...
    @property
    def running(self) -> list[tuple[tuple[int, ...], float]]: ...
    def chosen(self) -> tuple[int, ...]: ...
    def best(self, count: int) -> list[tuple[tuple[int, ...], float]]: ...

def bans(searches: list[BeamSearch]) -> tuple[Ints, Ints]: ...
def step(
    searches: list[BeamSearch],
    sources: list[SourceRows],
    ids: Ints,
    log_probs: NDArray[np.float32],
) -> list[tuple[int, AtlasError]]: ...
