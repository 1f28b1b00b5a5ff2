"""The Model interface: the contract between a model and whatever drives it.

One object runs every sequence; each sequence carries its own state; the caller decides what to
run, what to accept and what to roll back. The contract of each group is in its file's protocol.
What holds for all of them:

- **One owner.** Counters and block table of a sequence live in one native object, which
  ``SequenceState`` wraps. ``lifecycle.reserve`` is the only allocator. Forwards and verifies build
  a ``Batch`` for one internal ``run(batch)``, which neither allocates nor advances; either the
  hand-called method advances, or the scheduler's commit.
- **Atomicity.** A call that raises leaves every sequence as it was, or marks it failed.
- **Views.** Logits and hidden rows live in arenas that later calls reuse; a view whose rows were
  overwritten raises ``StaleHandleError``. Decode owns the rows from 0 on, finishing prefills the
  rows above them.
- **Positions.** ``seq.seq_len`` is the number of positions whose K/V and recurrent state are
  committed. Rows kept count the anchor; drafts accepted do not.
- **Threads.** One thread at a time drives a model; misuse raises ``WrongThreadError`` or, while an
  engine's owner thread runs, ``ModelBusyError``.
- **Streams.** ``stream=None`` is the default stream; other streams are ordered by events.

What a scheduler owes a model: it (a) never splits a prompt when ``forward.requires_single_chunk``;
(b) runs one sequence at a time when ``forward.hc_mult > 0``; (c) ends a non-last chunk at
``forward.prefill_tail_split``; (d) calls ``ssm.normalize`` between chunks and
``lifecycle.poll_kv_calibration`` once per chunk; (e) uses separate decode and prefill commands when
``experts.is_parallel``; (f) asks ``verify.can_batch`` and otherwise verifies one by one; (g) caps
drafts at the least ``draft.slot_draft_capacity`` of the active slots; (h) groups proposals by
``draft.propose_batch_max``; (i) spills, never requeues, a sequence for which
``vision.contains_pad``; (j) refuses a rewind when ``ssm.rollback_unsupported`` or a hybrid has no
snapshot for it; (k) caches before it frees; (l) compacts, then detaches, with nothing between;
(m) reclaims prefix blocks before admission and resume; (n) tears down only after drain and
synchronise.
"""

from __future__ import annotations

from dataclasses import dataclass

from atlas.config import ModelConfig
from atlas.model.adapters import ModelAdapters
from atlas.model.capability import Unavailable, require, unavailable
from atlas.model.circuit import ModelCircuit
from atlas.model.draft import ModelDraft
from atlas.model.experts import ModelEp
from atlas.model.feed import ModelDeviceFeed
from atlas.model.forward import ModelForward
from atlas.model.lifecycle import ModelLifecycle
from atlas.model.logits import ModelLogits
from atlas.model.ssm import ModelSsmState
from atlas.model.streams import ModelStreams
from atlas.model.verify import ModelVerify
from atlas.model.vision import ModelVision

__all__ = [
    "GROUPS",
    "Model",
    "ModelAdapters",
    "ModelCircuit",
    "ModelDeviceFeed",
    "ModelDraft",
    "ModelEp",
    "ModelForward",
    "ModelLifecycle",
    "ModelLogits",
    "ModelSsmState",
    "ModelStreams",
    "ModelVerify",
    "ModelVision",
    "Unavailable",
    "require",
    "unavailable",
]

GROUPS: dict[str, type] = {
    "forward": ModelForward,
    "logits": ModelLogits,
    "lifecycle": ModelLifecycle,
    "streams": ModelStreams,
    "verify": ModelVerify,
    "ssm": ModelSsmState,
    "draft": ModelDraft,
    "adapters": ModelAdapters,
    "experts": ModelEp,
    "vision": ModelVision,
    "feed": ModelDeviceFeed,
    "circuit": ModelCircuit,
}
"""The protocol of each attribute of :class:`Model`; the file of a group has the group's name."""


@dataclass(frozen=True, slots=True, repr=False)
class Model:
    """A loaded model: its configuration and up to twelve capability groups.

    The first five groups always exist. Each other group is None where the model or its backend
    lacks the capability, which type checkers make callers ask about; :func:`require` turns that
    None into a ``CapabilityError`` when an engine is configured. In a group that exists, facts of
    capabilities still missing are False, 0 or None, and their methods raise ``CapabilityError``.
    """

    config: ModelConfig
    forward: ModelForward
    logits: ModelLogits
    lifecycle: ModelLifecycle
    streams: ModelStreams
    verify: ModelVerify
    ssm: ModelSsmState | None = None
    draft: ModelDraft | None = None
    adapters: ModelAdapters | None = None
    experts: ModelEp | None = None
    vision: ModelVision | None = None
    feed: ModelDeviceFeed | None = None
    circuit: ModelCircuit | None = None

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups that exist, in the order of the attributes."""
        return tuple(name for name in GROUPS if getattr(self, name) is not None)

    def __repr__(self) -> str:
        config = self.config
        return (
            f"Model({config.architecture}, {config.num_layers} layers × {config.hidden_size}, "
            f"groups: {' '.join(self.groups)})"
        )
