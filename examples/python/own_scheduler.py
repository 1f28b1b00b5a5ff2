"""A host with its own scheduler: prompts arrive over time, and each step mixes their work.

Every step is one call, `mixed_forward_batch`: a token for each sequence that decodes, and the next
window of up to two prompts. The engine's own scheduler is not involved, yet the texts are the ones
it gives, because no row depends on what shares its step.

    python examples/python/own_scheduler.py [MODEL]
"""

import sys
from collections import deque
from dataclasses import dataclass, field

import atlas
from atlas.model import Model
from atlas.model.records import PrefillSlice
from atlas.model.sequence import SequenceState

PROMPTS = ["This module provides", "To open a file,", "Return a new list", "def read_file(path):"]
ARRIVE_EVERY = 3  # steps between one prompt and the next
WINDOW = 4  # prompt tokens of one sequence in a step
PREFILLS = 2  # prompts in a step


@dataclass
class Job:
    """One prompt on its way: how much of it has run, and what was generated."""

    prompt: list[int]
    seq: SequenceState
    output: list[int] = field(default_factory=list)

    def window(self) -> PrefillSlice:
        """The next piece of the prompt."""
        start = self.seq.seq_len
        length = min(WINDOW, len(self.prompt) - start)
        return PrefillSlice(
            self.prompt, self.seq, start, length, start + length == len(self.prompt)
        )


class Scheduler:
    """First come, first served, with prompts in windows so that no running sequence waits long."""

    def __init__(self, model: Model, max_tokens: int, end_ids: tuple[int, ...] = ()) -> None:
        self.model = model
        self.max_tokens = max_tokens
        self.end_ids = end_ids
        self.prefilling: deque[Job] = deque()
        self.decoding: list[Job] = []

    def add(self, prompt: list[int]) -> Job:
        """Take a prompt in; its job fills as steps run."""
        job = Job(prompt, self.model.lifecycle.alloc_sequence())
        self.prefilling.append(job)
        return job

    def step(self) -> None:
        """One sweep over the weights: a token of each running sequence, and some windows."""
        decoding = self.decoding
        admitted = list(self.prefilling)[:PREFILLS]
        result = self.model.forward.mixed_forward_batch(
            [job.output[-1] for job in decoding],
            [job.seq for job in decoding],
            [job.window() for job in admitted],
        )
        chosen: list[tuple[Job, int]] = []
        if result.decode_logits is not None:
            ids = self.model.logits.argmax_batch(result.decode_logits, len(decoding))
            chosen += zip(decoding, ids.tolist(), strict=True)
        for job, view in zip(admitted, result.prefill_logits, strict=True):
            if view is not None:  # its prompt is complete
                self.prefilling.remove(job)
                chosen.append((job, self.model.logits.argmax(view)))
        self.decoding = [job for job, token in chosen if self.goes_on(job, token)]

    def goes_on(self, job: Job, token: int) -> bool:
        """Keep a token; a job that ends gives its KV blocks back."""
        ended = token in self.end_ids
        if not ended:
            job.output.append(token)
            ended = len(job.output) == self.max_tokens
        if ended:
            self.model.lifecycle.free_sequence(job.seq)
        return not ended


def serve(
    model: Model, prompts: list[list[int]], max_tokens: int, end_ids: tuple[int, ...] = ()
) -> list[list[int]]:
    """Run prompts that arrive one after another; the ids generated for each."""
    scheduler = Scheduler(model, max_tokens, end_ids)
    jobs: list[Job] = []
    num_steps = 0
    while len(jobs) < len(prompts) or scheduler.prefilling or scheduler.decoding:
        if len(jobs) < len(prompts) and num_steps % ARRIVE_EVERY == 0:
            jobs.append(scheduler.add(prompts[len(jobs)]))
        if scheduler.prefilling or scheduler.decoding:
            scheduler.step()
        num_steps += 1
    return [job.output for job in jobs]


if __name__ == "__main__":
    model_name = sys.argv[1] if len(sys.argv) > 1 else None  # atlas-tiny, in the package
    # On a GPU the prompts of a hybrid such as atlas-tiny split at multiples of 64 tokens only.
    with atlas.Engine(model_name, device="cpu") as engine:
        encoded = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
        outputs = serve(engine.model, encoded, 12, engine.eos_token_ids)
        for prompt, ids in zip(PROMPTS, outputs, strict=True):
            print(repr(prompt + engine.tokenizer.decode(ids)))
        again = engine.generate(PROMPTS, atlas.SamplingParams(max_tokens=12))
        same = [completion.token_ids for completion in again] == [tuple(ids) for ids in outputs]
        print("what the engine's own scheduler gives:", same)
