"""What can happen to a request. The composition matrix is every pair of these."""

from __future__ import annotations

from atlas import SamplingParams
from atlas._native.plan import ActionKind, EntryKind
from tests.composition.harness import BLOCK_SIZE, MAX_TOKENS, PROMPT, Run


class Feature:
    """Nothing happens."""

    name = "plain"
    meaning = "alone, one prefill, then token by token"
    chunk_tokens = 128
    one_sample = False  # refused where n > 1
    feed = False  # needs an engine that launches steps ahead

    def params(self, params: SamplingParams) -> SamplingParams:
        """The target's parameters."""
        return params

    def before(self, run: Run) -> None:
        """Before the target is submitted."""

    def during(self, run: Run) -> None:
        """Once every sample of the target has written a few tokens."""

    def prove(self, run: Run) -> None:
        """Fail unless it happened."""


class Chunked(Feature):
    name = "chunked"
    meaning = "the prompt runs in chunks of 5 tokens"
    chunk_tokens = 5

    def prove(self, run: Run) -> None:
        chunks = [
            rows
            for step in run.recorder.steps
            for name, kind, rows in step.entries
            if name == run.target and kind == EntryKind.PROMPT
        ]
        assert len(chunks) > 4
        assert max(chunks) == 5


class WarmPrefix(Feature):
    name = "warm prefix"
    meaning = "the prefix cache holds 3 of the prompt's blocks"
    num_cached = 3 * BLOCK_SIZE

    def before(self, run: Run) -> None:
        run.submit("warmer", PROMPT[: self.num_cached + 2], 1, 0)
        run.until(lambda: "warmer" in run.ended)

    def prove(self, run: Run) -> None:
        assert run.ended[run.target].usage.cached_tokens == self.num_cached


class Preempted(Feature):
    """A request of higher rank needs a block when none is free; what it frees is spoiled."""

    action: ActionKind

    def during(self, run: Run) -> None:
        bully = f"bully by {self.name}"
        run.engine._loop.scheduler.set_spill(self.action == ActionKind.SPILL)
        run.submit(bully, range(20, 34), 64, -1)
        run.until(lambda: run.num_tokens(bully) > 0)
        before = run.preemptions(self.action)
        with run.all_free_blocks():
            run.until(lambda: run.preemptions(self.action) > before)
        with run.all_free_blocks() as blocks:
            run.spoil(blocks)
        assert run.target not in run.ended
        run.engine.cancel(bully)

    def prove(self, run: Run) -> None:
        assert run.preemptions(self.action) > 0
        assert run.engine._loop.scheduler.num_preemptions > 0


class Spilled(Preempted):
    name = "preempted by spill"
    meaning = "its blocks wait in host memory; those it had are overwritten"
    action = ActionKind.SPILL

    def prove(self, run: Run) -> None:
        super().prove(run)
        assert run.preemptions(ActionKind.RESTORE) >= run.preemptions(ActionKind.SPILL)


class Requeued(Preempted):
    name = "preempted by requeue"
    meaning = "its blocks are lost; prompt and generated tokens run again"
    action = ActionKind.REQUEUE

    def prove(self, run: Run) -> None:
        super().prove(run)
        replayed = [
            rows
            for step in run.recorder.steps
            for name, kind, rows in step.entries
            if name == run.target and kind == EntryKind.STEP and rows > 1
        ]
        assert replayed, "no generated token ran again"


class Batched(Feature):
    name = "batched with others"
    meaning = "three other requests share its steps"
    neighbours = ("first", "second", "third")

    def before(self, run: Run) -> None:
        for i, name in enumerate(self.neighbours):
            run.submit(name, [9 + i, 40 + i, *range(20, 28 - i)], 60, 0)

    def prove(self, run: Run) -> None:
        for name in self.neighbours:
            assert run.shared_steps(name) > 5


class Sampled(Feature):
    name = "n = 3"
    meaning = "three samples share the prompt's blocks"

    def params(self, params: SamplingParams) -> SamplingParams:
        return params.replace(n=3)

    def prove(self, run: Run) -> None:
        assert len(run.ended[run.target].samples) == 3
        together = [
            sum(name == run.target for name, _, _ in step.entries) for step in run.recorder.steps
        ]
        assert max(together) == 3


class Forked(Feature):
    name = "forked"
    meaning = "`engine.fork` while it runs; the fork has the same seed and must agree as well"
    one_sample = True
    twin = "twin"

    def during(self, run: Run) -> None:
        run.when_running(lambda: run.engine.fork(run.target, new_id=self.twin))

    def prove(self, run: Run) -> None:
        assert run.ended[self.twin].token_ids == run.ended[run.target].token_ids
        assert run.ended[self.twin].logprobs == run.ended[run.target].logprobs
        assert run.shared_steps(self.twin) > 0


class Rewound(Feature):
    name = "rewound"
    meaning = "`engine.rewind` to its first token while it runs"
    one_sample = True

    def during(self, run: Run) -> None:
        run.until(lambda: run.num_tokens(run.target) > 3)
        position = len(PROMPT) + 1
        standing = run.when_running(lambda: run.engine.rewind(run.target, position))
        assert len(standing.token_ids) == 1

    def prove(self, run: Run) -> None:
        assert run.num_tokens(run.target) > MAX_TOKENS


class Saved(Feature):
    name = "saved and restored"
    meaning = "to a file, then cancelled, its blocks overwritten, and read back"
    one_sample = True

    def during(self, run: Run) -> None:
        path = run.folder / "session"
        run.when_running(lambda: run.engine.save(run.target, path))
        assert run.engine.cancel(run.target)
        run.until(lambda: run.target in run.ended)
        assert run.ended.pop(run.target).finish_reason == "cancelled"
        with run.all_free_blocks() as blocks:
            run.spoil(blocks)
        run.engine.restore(path, request_id=run.target, priority=1)
        run.step()

    def prove(self, run: Run) -> None:
        assert run.preemptions(ActionKind.RESTORE) > run.preemptions(ActionKind.SPILL)


class CancelledNeighbours(Feature):
    name = "cancelled neighbours"
    meaning = "two requests beside it are cancelled: one that writes, one that reads its prompt"

    def before(self, run: Run) -> None:
        run.submit("writer", [8, 30, 31, 32, 33], 60, 0)

    def during(self, run: Run) -> None:
        run.submit("reader", [3 + i % 150 for i in range(300)], 8, 0)
        run.step()
        assert run.engine.cancel("writer")
        assert run.engine.cancel("reader")
        run.step()

    def prove(self, run: Run) -> None:
        assert {run.ended[name].finish_reason for name in ("reader", "writer")} == {"cancelled"}
        assert run.ended["reader"].usage.completion_tokens == 0
        assert 1 <= run.shared_steps("reader") <= 2
        assert run.shared_steps("writer") > 1


class Fed(Feature):
    name = "fed"
    meaning = "steps are launched before the host has seen the last one's tokens"
    feed = True

    def params(self, params: SamplingParams) -> SamplingParams:
        return params.replace(logprobs=None)  # the host must see the logits for these

    def before(self, run: Run) -> None:
        run.submit("fed neighbour", [7, 21, 22], 12, 0)

    def prove(self, run: Run) -> None:
        fed = [step.num_fed for step in run.recorder.steps]
        assert max(fed) > 0, "no row took its token from a step under way"
        if run.params.temperature == 0:
            assert sum(fed) > MAX_TOKENS // 2


FEATURES: tuple[Feature, ...] = (
    Chunked(),
    WarmPrefix(),
    Spilled(),
    Requeued(),
    Batched(),
    Sampled(),
    Forked(),
    Rewound(),
    Saved(),
    CancelledNeighbours(),
    Fed(),
)


def happens_during(feature: Feature) -> bool:
    """Whether it makes a difference what it follows."""
    return type(feature).during is not Feature.during
