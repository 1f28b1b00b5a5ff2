"""What a step of translation runs and has to settle: requests, candidates, chosen tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atlas.errors import AtlasError
from atlas.generation import Generation
from atlas.model.beam_decode import BeamDecode
from atlas.model.core import Ints
from atlas.model.translator_core import Floats
from atlas.sample_decode import SampleDecode
from atlas.sampler import Sampled
from atlas.translation_request import TranslationRequest

Decode = BeamDecode | SampleDecode
Choice = tuple[Generation, Sampled | AtlasError]


@dataclass(slots=True, eq=False)
class Running:
    """A request whose source is encoded."""

    request: TranslationRequest
    decode: Decode
    rank: tuple[int, int]  # priority, then order of arrival: who is preempted last


@dataclass(slots=True)
class Sweep:
    """What a step has to settle once its rows have run."""

    beams: list[tuple[Running, BeamDecode]] = field(default_factory=list)
    samplers: list[tuple[Running, SampleDecode]] = field(default_factory=list)
    drawn: frozenset[int] = frozenset()  # rows of the arena whose tokens the device draws
    found: tuple[Ints, Floats] | None = None  # candidates of the searches
    choices: list[list[Choice]] = field(default_factory=list)  # of each sampler

    @classmethod
    def of(cls, running: Sequence[Running]) -> Sweep:
        """One of these requests."""
        pairs = [(entry, entry.decode) for entry in running]
        return cls(
            [(entry, decode) for entry, decode in pairs if isinstance(decode, BeamDecode)],
            [(entry, decode) for entry, decode in pairs if isinstance(decode, SampleDecode)],
        )

    @property
    def decodes(self) -> list[Decode]:
        """All of them, in the order of their rows."""
        return [decode for _, decode in self.beams + self.samplers]

    @property
    def searches(self) -> list[BeamDecode]:
        """Those of ``beams``."""
        return [decode for _, decode in self.beams]
