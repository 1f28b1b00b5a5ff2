"""The engine: a model, its tokenizer, and many requests at once.

One class, because it is the public surface in one place: most lines are docstrings, and each
method is a few lines over ``intake`` (what comes in), ``driver`` (who steps), ``step_loop`` (the
step), ``branch``, ``session``, ``metrics`` and ``health``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

from atlas.backends.backend import DeviceName, choose_device
from atlas.backends.cpu.sampling import CompiledWeights
from atlas.branch import fork, rewind
from atlas.description import describe, html_table
from atlas.display import LoadProgress
from atlas.driver import Driver
from atlas.errors import (
    CapabilityError,
    ClosedError,
    InvalidArgumentError,
    KvExhausted,
    ModelBusyError,
    StaleHandleError,
)
from atlas.event import Event
from atlas.health import Health, check_health
from atlas.intake import Intake, Messages, Prompt, is_single
from atlas.live_request import LiveRequest
from atlas.memory_limit import within_limit
from atlas.metrics import Metrics, openmetrics
from atlas.model.load import LoadOptions, load_model, plan_load
from atlas.model.memory import return_freed_memory
from atlas.model.sequence import SequenceState
from atlas.model.translator_core import TranslatorCore
from atlas.request import Completion, Delta
from atlas.sampling import SamplingParams
from atlas.scheduling import SchedulingOptions
from atlas.session import PathLike, RestoredSequence, Row, Sessions
from atlas.step_loop import StepLoop
from atlas.tokenizer import Tokenizer, load_tokenizer
from atlas.translating import Translating
from atlas.translation import BeamParams, Language, Source, Translation
from atlas.translation_loop import TranslationLoop
from atlas.warmup import warm_up
from atlas.weights.checkpoint import open_checkpoint
from atlas.weights.locate import DEFAULT_MODEL, locate

if TYPE_CHECKING:
    from atlas.languages import Languages
    from atlas.model import Model


class Engine:
    """Generates text with one model, for many requests at once.

    Parameters
    ----------
    model : str or path, optional
        A GGUF file, a Hugging Face folder, a Hub id in the local cache, or a short name such as
        ``smollm2``. Default: ``atlas-tiny``, the small model inside the package, which continues
        text in the manner of Python's documentation.
    device : {"auto", "cpu", "cuda"}
        ``auto`` is an NVIDIA GPU where one can be used (the extra ``cuda``) and offers what the
        other options ask, else the CPU; ``describe()`` says which and why.
    stream : object, optional
        A CUDA stream of another library to run on: its handle, or an object with
        ``__cuda_stream__``. It must outlive the engine.
    dtype : {"auto", "float32"}
        ``auto`` keeps the weights as the file stores them, quantised or not (a GPU keeps formats
        without a kernel of their own in bfloat16); ``float32``, on the CPU, dequantises them.
    threads : int, optional
        On the CPU. Default: the CPUs this process may use. Results do not depend on it.
    max_seq_len : int, optional
        Positions of a sequence, prompt and output together (default: the model's, at most 8192).
    kv_tokens : int, optional
        Tokens the KV cache holds over all sequences (default: ``max_seq_len``).
    memory_limit : int, optional
        Bytes that weights, KV cache and buffers may take together. A KV cache whose
        ``kv_tokens`` is not given shrinks to fit; what does not fit raises OutOfMemoryError
        before anything is allocated.
    kv_dtype : {"auto", "float32", "float16", "bfloat16"}
        ``auto``: bfloat16 on a GPU; on the CPU float16 beside quantised weights, else float32.
    quantize : {"q8_0", "q4_0"}, optional
        Quantise float weights while they are loaded.
    quiet : bool, optional
        No progress display; default: only where there is no terminal or notebook.
    on_progress : callable, optional
        Called with bytes of weights loaded and in all. What it raises ends the load.
    max_waiting : int, optional
        Requests that may wait for their first token; ``submit`` refuses more.
    **scheduling
        Fields of :class:`atlas.scheduling.SchedulingOptions`.

    Notes
    -----
    Methods may be called from any thread. Steps are taken by whoever waits for a result, or by an
    owner thread (:meth:`start`). Two engines on the same file with the same weight options share
    its weights.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        stream: object = None,
        dtype: Literal["auto", "float32"] = "auto",
        threads: int | None = None,
        max_seq_len: int | None = None,
        kv_tokens: int | None = None,
        kv_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
        quantize: Literal["q8_0", "q4_0"] | None = None,
        quiet: bool | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        max_waiting: int | None = None,
        memory_limit: int | None = None,
        **scheduling: Any,
    ) -> None:
        if not isinstance(model, str | os.PathLike | None):
            raise InvalidArgumentError(
                f"model is {model!r}; allowed: a name, a path, or None for {DEFAULT_MODEL}"
            )
        if quiet not in (None, True, False):
            raise InvalidArgumentError(f"quiet is {quiet!r}; allowed: True, False, None")

        def options_on(chosen: DeviceName) -> tuple[SchedulingOptions, LoadOptions]:
            # Steps with few prompt tokens would leave most of a GPU idle.
            large = _CUDA_STEPS if chosen == "cuda" else {}
            schedule = SchedulingOptions.from_mapping(
                large | scheduling, beside=Engine.__init__.__kwdefaults__ or ()
            )
            return schedule, LoadOptions(
                dtype=dtype,
                kv_dtype=kv_dtype,
                threads=len(os.sched_getaffinity(0)) if threads is None else threads,
                max_seq_len=max_seq_len,
                kv_tokens=kv_tokens,
                quantize=quantize,
                max_step_tokens=max(512, schedule.max_running + schedule.chunk_tokens),
                max_running=schedule.max_running,
                device=chosen,
                stream=stream,
                state_snapshots=schedule.state_snapshots,
            )

        chosen, self.device_reason = choose_device(device, dtype=dtype, kv_dtype=kv_dtype)
        schedule, options = options_on(chosen)
        started = time.perf_counter()
        location = locate(model)
        _log.info("model %s", location.path)
        with (
            open_checkpoint(location) as checkpoint,
            LoadProgress(checkpoint, quiet, on_progress) as progress,
        ):
            if device == "auto" and chosen == "cuda":
                try:
                    plan_load(checkpoint, options)
                except CapabilityError as error:
                    self.device_reason = f"the GPU cannot run this model: {error}"
                    schedule, options = options_on("cpu")
            _log.info("device %s: %s", options.device, self.device_reason)
            if memory_limit is not None:
                options = within_limit(checkpoint, options, memory_limit)
            self.path = checkpoint.path
            self.format_name = checkpoint.format_name
            tokenizer = (
                Tokenizer.from_gguf(checkpoint.metadata)
                if location.kind == "gguf"
                else load_tokenizer(location.path)
            )
            checkpoint.forget_metadata()
            return_freed_memory()
            self._loaded = load_model(
                checkpoint, options, on_progress=progress.advance, on_compile=progress.compiling
            )
            core = self._loaded.core
            try:
                weights = CompiledWeights(core.runtime.host_compiler)
                self._weights = weights
                if isinstance(core, TranslatorCore):
                    self._translating: Translating | None = Translating(
                        core, tokenizer, self.path, weights, schedule
                    )
                    self._intake: Intake = self._translating.intake
                    self._loop: StepLoop | TranslationLoop = self._translating.loop
                else:
                    self._translating = None
                    self._intake = Intake(core, tokenizer, self.path, weights)
                    self._loop = StepLoop(core, schedule, weights)
                self._driver = Driver(core, self._loop, max_waiting)
                self._sessions: Sessions | None = None
                if isinstance(self._loop, StepLoop):
                    self._sessions = Sessions(
                        core, self._loaded.model, self._driver, self._loop, self._intake
                    )
            except BaseException:
                core.close()
                raise
        return_freed_memory()
        self.options = options
        self.scheduling = schedule
        self.load_s = time.perf_counter() - started

    # -- parts --------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model's capability groups, for driving it by hand.

        Raises
        ------
        ModelBusyError
            The owner thread runs; use :meth:`paused`.
        """
        self._require_open()
        self._driver.require_not_owned("engine.model")
        return self._loaded.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises
        ------
        TokenizerError
            The model came without one; prompts of token ids still work.
        """
        self._require_open()
        return self._intake.tokenizer

    @property
    def max_seq_len(self) -> int:
        """Positions of a sequence at most."""
        return self._loaded.core.limits.max_seq_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: the config's and the tokenizer's."""
        return self._intake.eos_token_ids

    # -- whole completions --------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too
        self, prompts: str, params: SamplingParams | None = ...
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[int], params: SamplingParams | None = ...
    ) -> Completion: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = ...
    ) -> list[Completion]: ...
    def generate(
        self, prompts: Any, params: SamplingParams | None = None
    ) -> Completion | list[Completion]:
        """Complete one prompt or several; several run together.

        Parameters
        ----------
        prompts : str, sequence of int, or sequence of these
            Text (encoded with the model's special tokens added) or token ids.
        params : SamplingParams, optional
            Default: greedy, 128 tokens.

        Returns
        -------
        Completion or list of Completion
            A list exactly when several prompts were given, in their order.

        Raises
        ------
        InvalidArgumentError, PromptTooLongError, TokenizerError, KvExhausted
            A prompt or parameter is refused, before anything runs.
        QueueFullError
            More prompts than ``max_waiting`` leaves room for: none runs.
        AtlasError
            All samples of a single prompt failed while they ran. Else a failed one has
            ``finish_reason == "error"`` and ``error`` set, and the others go on.
        """
        self._require_open()
        single = is_single(prompts)
        resolved = self._intake.params(params)
        batch = [self._intake.prompt_ids(p, resolved) for p in ([prompts] if single else prompts)]
        done: dict[str, Completion] = {}

        def keep(event: Event) -> None:
            if event.completion is not None:
                done[event.request_id] = event.completion

        requests = [self._intake.request(ids, resolved, keep, is_followed=False) for ids in batch]
        self._run(requests, lambda: len(done) == len(requests), refuse=single)
        completions = [done[request.request_id] for request in requests]
        if not single:
            return completions
        completion = completions[0]
        if completion.error is not None and all(s.error is not None for s in completion.samples):
            raise completion.error
        return completion

    def _run(
        self, requests: Sequence[LiveRequest], done: Callable[[], bool], *, refuse: bool
    ) -> None:
        """Submit and step until ``done``; whatever interrupts this cancels the requests.

        A request that the KV cache could never hold is refused, or ends with that error.
        """
        try:
            for request in requests:
                try:
                    self._driver.submit(request, public=False)
                except KvExhausted as error:
                    if refuse:
                        raise
                    request.end_all(error)
            self._driver.advance_until(done)
        except BaseException:
            self._abandon(requests)
            raise

    def _abandon(self, requests: Sequence[LiveRequest]) -> None:
        """Cancel requests and give their blocks back now, unless the owner thread will.

        In a callback of a step, or where a generator is collected within one, the step that
        follows gives them back: the one under way still counts on every request that it runs.
        """
        for request in requests:
            self._driver.cancel(request.request_id)
        try:
            if not self._driver.owned:
                with self._driver.between_steps():
                    pass
        except (ClosedError, StaleHandleError, ModelBusyError):
            return  # nothing is left to give back, or not yet

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt, giving out text as it becomes final.

        Arguments are checked now; the request is submitted when the iterator is first advanced.
        Closing the iterator (or leaving its loop) cancels it. The last delta has a
        ``finish_reason``. ``n`` must be 1 and ``prompt_logprobs`` None.
        """
        self._require_open()
        resolved = self._intake.params(params)
        if resolved.n != 1:
            raise InvalidArgumentError(f"n is {resolved.n}; allowed with stream: 1")
        if resolved.prompt_logprobs is not None:
            raise InvalidArgumentError("prompt_logprobs is set; allowed with stream: None")
        return self._stream(self._intake.prompt_ids(prompt, resolved), resolved)

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        events: deque[Event] = deque()
        request = self._intake.request(ids, params, events.append)
        self._driver.submit(request, public=False)
        last = False
        try:
            while not last:
                self._driver.advance_until(lambda: bool(events))
                event = events.popleft()
                last = event.is_last
                if event.error is not None:
                    raise event.error
                yield Delta(
                    event.text,
                    event.token_ids,
                    event.logprobs,
                    event.finish_reason,
                    event.stop_reason,
                )
        finally:
            if not last:
                self._abandon([request])

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Messages | None = None,
        **variables: Any,
    ) -> Completion:
        """Answer a conversation in the model's own chat format.

        Parameters
        ----------
        messages : sequence of {"role": …, "content": …}
            Contents are plain text: they can never become control tokens.
        params : SamplingParams, optional
        tools, **variables
            Passed to the chat template.
        """
        ids = self.chat_token_ids(messages, tools=tools, **variables)
        return self.generate(ids, params)

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Messages | None = None,
        **variables: Any,
    ) -> Iterator[Delta]:
        """:meth:`chat`, streamed as :meth:`stream` does."""
        return self.stream(self.chat_token_ids(messages, tools=tools, **variables), params)

    def chat_token_ids(
        self, messages: Messages, *, tools: Messages | None = None, **variables: Any
    ) -> list[int]:
        """The token ids of a conversation, ready for the assistant's next turn."""
        self._require_open()
        return self._intake.chat_ids(messages, tools, variables)

    # -- requests and events ------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: object = None,
    ) -> str:
        """Queue a request; its events come from :meth:`step` or :meth:`poll`. Never waits.

        Parameters
        ----------
        prompt : str or sequence of int
        params : SamplingParams, optional
        request_id : str, optional
            Default: a new one. It may be used again once the request has ended.
        priority : int
            Lower runs first and is preempted last.
        user : object
            Given back in every event.

        Returns
        -------
        str
            The request's id.

        Raises
        ------
        InvalidArgumentError, PromptTooLongError, TokenizerError
        QueueFullError
            ``max_waiting`` requests wait, or the engine drains.
        KvExhausted
            The KV cache cannot hold this request even alone.
        """
        self._require_open()
        resolved = self._intake.params(params)
        ids = self._intake.prompt_ids(prompt, resolved)
        request = self._intake.request(
            ids, resolved, _ignore, request_id=request_id, priority=priority, user=user
        )
        self._driver.submit(request, public=True)
        return request.request_id

    def step(self) -> list[Event]:
        """Run one step and return the events since the last call (those of ``submit``).

        Raises
        ------
        ModelBusyError
            The owner thread takes the steps; use :meth:`poll`.
        """
        self._require_open()
        self._driver.require_not_owned("engine.step()")
        self._driver.advance()
        return self._driver.take_events()

    def poll(self, timeout: float | None = None) -> list[Event]:
        """Events of submitted requests, as soon as there are any.

        Without an owner thread this takes the steps itself.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; None: until there are events. An engine without unfinished
            requests (and without an owner thread) returns an empty list at once.
        """
        self._require_open()
        return self._driver.wait_events(timeout)

    def cancel(self, request_id: str) -> bool:
        """Ask for a request to end; False when it is not live (any more).

        It takes effect within one step, that is one prefill chunk.
        """
        self._require_open()
        return self._driver.cancel(request_id)

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs.

        The last events of one that ended may not have been taken yet: :meth:`poll` returns them at
        once. That is so where the owner thread took its last step, or where :meth:`fork`,
        :meth:`rewind` or :meth:`save` finished the step under way.
        """
        self._require_open()
        return self._driver.has_unfinished

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: object = None,
    ) -> AsyncIterator[Event]:
        """Events of one request, in an asyncio program; leaving the generator cancels it.

        Starts the owner thread if it does not run yet.
        """
        self._require_open()
        resolved = self._intake.params(params)
        ids = self._intake.prompt_ids(prompt, resolved)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def send(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:  # the loop was closed: nobody reads on
                self._driver.cancel(event.request_id)

        request = self._intake.request(
            ids, resolved, send, request_id=request_id, priority=priority, user=user
        )
        self._driver.start()
        self._driver.submit(request, public=False)
        last = False
        try:
            while not last:
                event = await events.get()
                last = event.is_last
                yield event
        finally:
            if not last:
                self._driver.cancel(request.request_id)

    # -- running requests ---------------------------------------------------------------------

    def fork(
        self, request_id: str, *, new_id: str | None = None, params: SamplingParams | None = None
    ) -> str:
        """Start a second request that stands where a running one stands; both go on apart.

        Blocks are shared and copied when one of the two first writes. The fork's events are
        public and bring what is new; its completion holds the whole output, and its timings
        count from the fork on.

        Parameters
        ----------
        request_id : str
            A request of one sample that has a token.
        new_id : str, optional
            The fork's id; default: a new one. User tag and priority are the request's.
        params : SamplingParams, optional
            Default: the request's own, with its seed, so that the fork would draw the very same
            tokens. Others apply from the next token on (penalties, minima and stops count the
            output so far); without a seed they get one. ``max_tokens`` counts from the prompt
            and cannot grow; log-probabilities cannot be added.

        Returns
        -------
        str
            The fork's id.

        Raises
        ------
        SequenceStateError
            The request waits, is preempted, or its prompt is not done.
        InvalidArgumentError
            No such request is live; ``n`` is not 1; the parameters do not fit the output so far.
        QueueFullError
            As in :meth:`submit`.
        """
        self._require_open()
        loop = self._step_loop("fork")
        twin = fork(self._driver, loop, self._intake, request_id, new_id, params)
        return twin.request_id

    def rewind(self, request_id: str, position: int) -> Delta:
        """Drop a running request's tokens from ``position`` on; it goes on from there.

        What follows equals the same request run afresh to that position: tokens, random draws,
        penalties, log-probabilities and stops. Latencies and token counts already in
        :meth:`metrics` stay.

        Parameters
        ----------
        request_id : str
            A request of one sample that has a token.
        position : int
            Tokens to keep, prompt and output together; the prompt's length or more.

        Returns
        -------
        Delta
            Text, ids and log-probabilities that still stand, as deltas to that position gave
            them out. Text given out beyond it is void: whoever collected it goes on from this
            delta. Its public events that nobody has taken are dropped.

        Raises
        ------
        SequenceStateError, InvalidArgumentError
            As in :meth:`fork`; or the position is outside. With recurrent layers also where no
            snapshot of the state is early enough: some are kept before the prompt's end and at
            the latest block boundaries, while ``state_snapshots`` has room.
        """
        self._require_open()
        loop = self._step_loop("rewind")
        return rewind(self._driver, loop, self._intake, request_id, position)

    def save(
        self, target: str | SequenceState, path: PathLike, *, logits: Row | None = None
    ) -> None:
        """Save a running request, or a sequence driven by hand, to a file; both stay as they are.

        The file holds KV, tokens, and all that the sampler and the text need to go on. Steps
        wait while it is written, and it replaces ``path`` only once it is complete.

        Parameters
        ----------
        target : str or SequenceState
            The id of a request of one sample that has a token, without a ``logits_processor``.
        path : path
        logits : LogitsView or float32 [C], optional
            A sequence's last row, kept beside it. (A request needs none: its next token is
            chosen already.)

        Raises
        ------
        SequenceStateError
            The request waits, is preempted, or its prompt is not done; or the sequence failed,
            was freed, or a verify of it awaits its accept.
        InvalidArgumentError
            No such request is live, or it cannot be saved; the message says why.
        OSError
        """
        self._require_open()
        if isinstance(target, SequenceState):
            self._saving("save").save_sequence(target, path, logits)
        elif logits is not None:
            raise InvalidArgumentError("logits are given; allowed for a request: None")
        else:
            self._saving("save").save_request(target, path)

    def restore(
        self,
        path: PathLike,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: object = None,
    ) -> str | RestoredSequence:
        """Go on from a file that :meth:`save` wrote, bitwise as if nothing had happened.

        Parameters
        ----------
        path : path
        request_id, priority, user
            Of a restored request, as in :meth:`submit`. Its events are public and bring what is
            new; its completion holds the whole output, and its timings count from now on.

        Returns
        -------
        str or RestoredSequence
            The request's id; or the sequence, and its logits where they were saved.

        Raises
        ------
        InvalidArgumentError
            The file is from another model or other numerics, damaged, or no session; the message
            says which.
        KvExhausted
            The KV cache cannot hold it.
        QueueFullError
            As in :meth:`submit`.
        OSError
        """
        self._require_open()
        restored = self._saving("restore").restore(
            path, request_id=request_id, priority=priority, user=user
        )
        return restored if isinstance(restored, RestoredSequence) else restored.request_id

    def _saving(self, what: str) -> Sessions:
        self._step_loop(what)
        assert self._sessions is not None
        return self._sessions

    def _step_loop(self, what: str) -> StepLoop:
        """The loop of a model that completes prompts."""
        if not isinstance(self._loop, StepLoop):
            raise CapabilityError(
                f"engine.{what} is not available for translation models: {self.path} is one"
            )
        return self._loop

    # -- translation --------------------------------------------------------------------------

    @property
    def languages(self) -> Languages:
        """The languages of a translation model.

        Raises
        ------
        CapabilityError
            The model does not translate.
        TokenizerError
            It came without a tokenizer; token ids of language tags still work.
        """
        self._require_open()
        return self._translator("languages").intake.languages

    @overload
    def translate(
        self,
        texts: str,
        *,
        source: Language = ...,
        target: Language = ...,
        params: BeamParams | SamplingParams | None = ...,
        **beam: Any,
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Sequence[int],
        *,
        source: Language = ...,
        target: Language = ...,
        params: BeamParams | SamplingParams | None = ...,
        **beam: Any,
    ) -> Translation: ...
    @overload
    def translate(
        self,
        texts: Sequence[Source],
        *,
        source: Language = ...,
        target: Language = ...,
        params: BeamParams | SamplingParams | None = ...,
        **beam: Any,
    ) -> list[Translation]: ...
    def translate(
        self,
        texts: Any,
        *,
        source: Language = 0,
        target: Language = 0,
        params: BeamParams | SamplingParams | None = None,
        **beam: Any,
    ) -> Translation | list[Translation]:
        """Translate one text or several; several run together, whatever their beams.

        Parameters
        ----------
        texts : str, sequence of int, or sequence of these
            Texts, or ids of their subwords; language tag and end token are added here.
        source, target : str or int
            Codes such as ``eng_Latn`` (:attr:`languages` lists them), or ids of their tags; 0 is
            what :meth:`set_default_languages` was given.
        params : BeamParams or SamplingParams, optional
            How to search, or how to draw samples instead. Default: beam search, four beams.
        **beam
            Fields of BeamParams in place of ``params``: ``num_beams=8, num_return=2``.

        Returns
        -------
        Translation or list of Translation
            A list exactly when several texts were given, in their order.

        Raises
        ------
        InvalidArgumentError, PromptTooLongError, TokenizerError, KvExhausted
            A text, language or parameter is refused, before anything runs.
        CapabilityError
            The model does not translate.
        AtlasError
            All hypotheses or samples of a single text failed while they ran. Else a failed one has
            ``finish_reason == "error"``, its translation ``error`` set, and the others go on.
        """
        self._require_open()
        translator = self._translator("translate")
        return translator.translate(texts, source, target, params, beam, self._run)

    def submit_translation(
        self,
        text: Source,
        *,
        source: Language = 0,
        target: Language = 0,
        params: BeamParams | SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        user: object = None,
        **beam: Any,
    ) -> str:
        """Queue a translation, as :meth:`submit` queues a prompt. Never waits.

        A beam search reports each hypothesis in one event at its end, best first; greedy and
        sampled translations report tokens as they come. The last event's ``completion`` has the
        hypotheses as ``samples``, each with its ``score``.

        Returns
        -------
        str
            The request's id.
        """
        self._require_open()
        request = self._translator("submit_translation").request(
            text,
            source,
            target,
            params,
            beam,
            _ignore,
            request_id=request_id,
            priority=priority,
            user=user,
        )
        self._driver.submit(request, public=True)
        return request.request_id

    def set_default_languages(self, source: Language, target: Language) -> None:
        """The languages of requests that name none, here and where ``model`` is driven by hand."""
        self._require_open()
        self._translator("set_default_languages").intake.set_default_languages(source, target)

    @property
    def translates(self) -> bool:
        """Whether this is a translation model: :meth:`translate` works, ``generate`` does not."""
        return self._translating is not None

    def _translator(self, what: str) -> Translating:
        if self._translating is None:
            raise CapabilityError(
                f"engine.{what} needs a translation model (M2M100, NLLB); {self.path} is not one"
            )
        return self._translating

    # -- who drives ---------------------------------------------------------------------------

    def start(self) -> None:
        """Let an owner thread take the steps; idempotent."""
        self._require_open()
        self._driver.start()

    def stop(self) -> None:
        """End the owner thread after its present step; requests stay and can go on."""
        self._driver.stop()

    @contextmanager
    def paused(self) -> Iterator[Model]:
        """The model for the calling thread, while the owner thread waits between two steps."""
        with self._driver.exclusive():
            yield self._loaded.model

    def _require_open(self) -> None:
        self._loaded.core.require_alive()

    def close(self) -> None:
        """End every request; release threads, weights and caches. Idempotent.

        Later calls raise ClosedError. In a forked child nothing happens: what the engine holds is
        the parent's.
        """
        if self._loaded.core.lifetime.in_own_process:
            self._driver.close()

    def __enter__(self) -> Engine:
        self._require_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- serving ------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Prepare the common step shapes, so that the first request is as fast as later ones.

        Records decode steps of up to 32 sequences and a full prompt chunk, and runs one, with a
        sampler. It may be called at any time, between two steps, and counts in no metric.
        """
        self._require_open()
        with self._driver.between_steps():
            if isinstance(self._loaded.core, TranslatorCore):
                self._loaded.core.warm_up()
                return
            warm_up(
                self._loaded.core,
                self._loaded.model,
                self._weights,
                chunk_tokens=self.scheduling.chunk_tokens,
                max_running=self.scheduling.max_running,
            )

    def ready(self) -> bool:
        """Whether a request submitted now would be taken: open, not draining, queue not full."""
        lifetime = self._loaded.core.lifetime
        alive = lifetime.in_own_process and not lifetime.closed and self._driver.failure is None
        return alive and self._driver.takes_requests

    def health(self, stalled_after_s: float = 30.0) -> Health:
        """Whether steps advance, seen from any thread, without waiting for one; never raises.

        Parameters
        ----------
        stalled_after_s : float
            With work and no step ended for longer, the state is ``stalled``.
        """
        if not stalled_after_s > 0:
            raise InvalidArgumentError(
                f"stalled_after_s is {stalled_after_s!r}; allowed: seconds above 0"
            )
        return check_health(self._loaded.core.lifetime, self._driver, self._loop, stalled_after_s)

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests from now on, and see to it that all others end.

        Without an owner thread this takes the steps. It does not close the engine.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None: as long as it takes.

        Returns
        -------
        bool
            False when time ran out; requests go on, and it may be called again.
        """
        self._require_open()
        return self._driver.drain(timeout)

    def metrics(self) -> Metrics:
        """Counters, gauges and latency histograms at this moment."""
        self._require_open()
        return self._loop.recorder.read(self._loaded.core, self._driver, self._loop)

    def openmetrics(self) -> str:
        """:meth:`metrics` in the OpenMetrics text format (``metrics.OPENMETRICS_CONTENT_TYPE``)."""
        return openmetrics(self.metrics())

    # -- description --------------------------------------------------------------------------

    def describe(self) -> dict[str, str]:
        """What was loaded, as short texts by name."""
        return describe(self._loaded, self.path, self.format_name, self.device_reason)

    def __repr__(self) -> str:
        about = self.describe()
        return f"Engine({about['model']}; {about['device']}; {about['memory']}; {about['state']})"

    def _repr_html_(self) -> str:
        return html_table("atlas.Engine", self.describe())


_CUDA_STEPS = {"chunk_tokens": 2048, "max_prefills": 16}
_log = logging.getLogger("atlas")


def _ignore(event: Event) -> None:
    """The sink of a request whose events are public."""
