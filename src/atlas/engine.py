"""The engine: a model, its tokenizer, and the loop that turns prompts into completions."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, overload

from atlas.backends.cpu.sampling import CompiledWeights
from atlas.chat import ChatTemplate
from atlas.display import LoadProgress
from atlas.errors import (
    AtlasError,
    ChatTemplateError,
    ClosedError,
    InvalidArgumentError,
    PromptTooLongError,
    StaleHandleError,
    TokenizerError,
)
from atlas.generation import Generation
from atlas.model.load import LoadOptions, load_model
from atlas.model.memory import return_freed_memory
from atlas.request import Completion, Delta, Timings, TokenLogprob, Usage
from atlas.sampler import score_token
from atlas.sampling import SamplingParams
from atlas.tokenizer import Tokenizer, load_tokenizer
from atlas.weights.checkpoint import open_checkpoint
from atlas.weights.locate import locate

if TYPE_CHECKING:
    from atlas.model import Model
    from atlas.model.logits_view import LogitsView
    from atlas.model.sequence import SequenceState

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, object]]


class Engine:
    """Generates text with one model.

    Parameters
    ----------
    model : str or path
        A GGUF file, a Hugging Face folder, a Hub id in the local cache, or a short name such as
        ``smollm2``.
    device : {"auto", "cpu"}
        ``auto`` is the CPU: no other backend exists yet.
    dtype : {"auto", "float32"}
        ``auto`` keeps the weights as the file stores them, quantised or not; ``float32``
        dequantises them.
    threads : int, optional
        Default: the CPUs this process may use. Results do not depend on it.
    max_seq_len : int, optional
        Positions of a sequence, prompt and output together (default: the model's, at most 8192).
    kv_tokens : int, optional
        Tokens the KV cache holds over all sequences (default: ``max_seq_len``).
    kv_dtype : {"auto", "float32", "float16"}
        ``auto``: float16 beside quantised weights, else float32.
    quantize : {"q8_0", "q4_0"}, optional
        Quantise float weights while they are loaded.
    quiet : bool, optional
        No progress display; default: only where there is no terminal or notebook.

    Notes
    -----
    Methods may be called from any thread; they take turns. Two engines on the same file with the
    same weight options share its weights.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: Literal["auto", "cpu"] = "auto",
        dtype: Literal["auto", "float32"] = "auto",
        threads: int | None = None,
        max_seq_len: int | None = None,
        kv_tokens: int | None = None,
        kv_dtype: Literal["auto", "float32", "float16"] = "auto",
        quantize: Literal["q8_0", "q4_0"] | None = None,
        quiet: bool | None = None,
    ) -> None:
        if not isinstance(model, str | os.PathLike):
            raise InvalidArgumentError(f"model is {model!r}; allowed: a name or a path")
        if device not in ("auto", "cpu"):
            raise InvalidArgumentError(f"device is {device!r}; allowed: 'auto', 'cpu'")
        if quiet not in (None, True, False):
            raise InvalidArgumentError(f"quiet is {quiet!r}; allowed: True, False, None")
        options = LoadOptions(
            dtype=dtype,
            kv_dtype=kv_dtype,
            threads=len(os.sched_getaffinity(0)) if threads is None else threads,
            max_seq_len=max_seq_len,
            kv_tokens=kv_tokens,
            quantize=quantize,
        )
        started = time.perf_counter()
        location = locate(model)
        self._lock = threading.RLock()
        with open_checkpoint(location) as checkpoint, LoadProgress(checkpoint, quiet) as progress:
            self.path = checkpoint.path
            self.format_name = checkpoint.format_name
            self._tokenizer = (
                Tokenizer.from_gguf(checkpoint.metadata)
                if location.kind == "gguf"
                else load_tokenizer(location.path)
            )
            checkpoint.forget_metadata()
            self._loaded = load_model(
                checkpoint, options, on_progress=progress.advance, on_compile=progress.compiling
            )
            return_freed_memory()
            try:
                self._weights = CompiledWeights(self._loaded.core.runtime.device.compiler)
            except BaseException:
                self._loaded.core.close()
                raise
        self.options = options
        self.load_s = time.perf_counter() - started
        self._chat: ChatTemplate | None = None

    # -- parts --------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model's capability groups, for driving it by hand."""
        self._require_open()
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
        if self._tokenizer is None:
            raise TokenizerError(
                f"{self.path} has no tokenizer files; allowed: prompts of token ids"
            )
        return self._tokenizer

    @property
    def max_seq_len(self) -> int:
        """Positions of a sequence at most."""
        return self._loaded.core.limits.max_seq_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: the config's and the tokenizer's."""
        known = dict.fromkeys(self._loaded.model.config.eos_token_ids)
        if self._tokenizer is not None:
            known.update(dict.fromkeys(self._tokenizer.eos_token_ids))
        return tuple(known)

    # -- generation ---------------------------------------------------------------------------

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
        """Complete one prompt or several.

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
        InvalidArgumentError, PromptTooLongError, TokenizerError
            A prompt or parameter is refused, before anything runs.
        AtlasError
            A single prompt's request failed while it ran. Among several, the failed one has
            ``finish_reason == "error"`` and ``error`` set, and the others go on.
        """
        single = _is_single(prompts)
        params = self._resolved(params)
        batch = [self._prompt_ids(p, params) for p in ([prompts] if single else prompts)]
        completions = [self._complete(ids, params) for ids in batch]
        if not single:
            return completions
        error = completions[0].error
        if error is not None:
            raise error
        return completions[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Complete one prompt, giving out text as it becomes final.

        Arguments are checked now; the work happens as the iterator is advanced. Closing the
        iterator (or leaving its loop) cancels the request. The last delta has a
        ``finish_reason``. ``n`` must be 1 and ``prompt_logprobs`` None.
        """
        params = self._resolved(params)
        if params.n != 1:
            raise InvalidArgumentError(f"n is {params.n}; allowed with stream: 1")
        if params.prompt_logprobs is not None:
            raise InvalidArgumentError("prompt_logprobs is set; allowed with stream: None")
        ids = self._prompt_ids(prompt, params)
        return self._stream(ids, self._generation(ids, params))

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
        if self._chat is None:
            if self.tokenizer.chat_template is None:
                raise ChatTemplateError(f"{self.path} has no chat template")
            self._chat = ChatTemplate.from_tokenizer(self.tokenizer)
        return self._chat.encode(self.tokenizer, messages, tools=tools, **variables)

    # -- the loop -----------------------------------------------------------------------------

    def _stream(self, ids: list[int], generation: Generation) -> Iterator[Delta]:
        """Prefill, then one decode a step; the sequence is freed however the loop ends."""
        with self._driving() as model:
            seq = model.lifecycle.alloc_sequence()
        try:
            view: LogitsView | None = None
            while True:
                with self._driving() as model:
                    if view is None:
                        view = model.forward.prefill(ids, seq)
                    else:
                        view = model.forward.decode(generation.last_token, seq)
                    assert view is not None
                    delta = generation.push(generation.choose(model, view))
                yield delta
                if generation.finished:
                    return
        finally:
            generation.cancel()
            self._free(seq)

    def _complete(self, ids: list[int], params: SamplingParams) -> Completion:
        started = time.perf_counter()
        first_token_s = 0.0
        samples, num_tokens = [], 0
        prompt_logprobs = None
        for index in range(params.n):
            generation = self._generation(ids, params, index)
            try:
                if params.prompt_logprobs is not None and prompt_logprobs is None:
                    prompt_logprobs = self._prompt_logprobs(ids, params.prompt_logprobs)
                for _ in self._stream(ids, generation):
                    first_token_s = first_token_s or time.perf_counter() - started
            except AtlasError as error:
                generation.fail(error)
            samples.append(generation.sample())
            num_tokens += generation.num_tokens
        return Completion(
            tuple(samples),
            tuple(ids),
            Usage(len(ids), num_tokens),
            Timings(first_token_s, time.perf_counter() - started),
            prompt_logprobs,
            params.seed,
        )

    def _prompt_logprobs(self, ids: list[int], num_top: int) -> tuple[TokenLogprob, ...]:
        """Each prompt token's log-probability under the tokens before it."""
        scored = [TokenLogprob(ids[0], None)]
        rows = self._loaded.core.limits.logits_rows
        with self._driving() as model:
            seq = model.lifecycle.alloc_sequence()
        try:
            for start in range(0, len(ids) - 1, rows):
                with self._driving() as model:
                    length = min(rows, len(ids) - start)
                    last = start + length == len(ids)
                    view = model.forward.prefill_chunk(ids, seq, start, length, last, logits="all")
                    assert view is not None
                    logits = view.numpy()
                    for i, token in enumerate(ids[start + 1 : start + length + 1]):
                        best = score_token(logits[i], token, num_top, self._weights)
                        scored.append(TokenLogprob(token, best.logprob, tuple(best.top)))
        finally:
            self._free(seq)
        return tuple(scored)

    def _free(self, seq: SequenceState) -> None:
        """Give a sequence's blocks back; after close there is nothing left to give back."""
        with suppress(ClosedError, StaleHandleError), self._driving() as model:
            model.lifecycle.free_sequence(seq)

    # -- requests -----------------------------------------------------------------------------

    def _generation(self, ids: list[int], params: SamplingParams, index: int = 0) -> Generation:
        return Generation(
            params,
            self._tokenizer,
            ids,
            vocab_size=self._loaded.model.config.vocab_size,
            eos_token_ids=self.eos_token_ids,
            max_seq_len=self.max_seq_len,
            sample_index=index,
            weights=self._weights,
        )

    def _resolved(self, params: SamplingParams | None) -> SamplingParams:
        """Parameters with a seed and with texts as ids."""
        self._require_open()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(
                f"params is a {type(params).__name__}; allowed: SamplingParams or None"
            )
        if params.stop_strings or params.has_unresolved_text:
            tokenizer = self.tokenizer
            params = params.with_token_ids(lambda text: tokenizer.encode(text, add_special=False))
        return params if params.greedy else params.with_seed()

    def _prompt_ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """A prompt as token ids: not empty, in the vocabulary, and within ``max_seq_len``."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, bytes | bytearray):
            raise InvalidArgumentError("a prompt is bytes; allowed: str or token ids")
        else:
            ids = [int(i) for i in self._loaded.core.token_array(prompt, "the prompt")]
        if not ids:
            raise InvalidArgumentError("the prompt is empty; allowed: one token or more")
        limit = self.max_seq_len - 1  # room for the first token
        if params.truncate_prompt == "left":
            ids = ids[-limit:]
        elif params.truncate_prompt is not None:
            ids = ids[-params.truncate_prompt :]
        if len(ids) > limit:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens; allowed: up to {limit} (max_seq_len "
                f"{self.max_seq_len}), or truncate_prompt='left'"
            )
        self._loaded.core.token_array(ids, "the prompt")
        return ids

    # -- who drives ---------------------------------------------------------------------------

    @contextmanager
    def _driving(self) -> Iterator[Model]:
        """The engine's turn on the model, from whatever thread."""
        self._require_open()  # before the lock, which may be held for ever in a forked child
        with self._lock:
            self._require_open()
            with self._loaded.core.driven_here():
                yield self._loaded.model

    def _require_open(self) -> None:
        self._loaded.core.require_alive()

    def close(self) -> None:
        """Release threads, weights and caches. Idempotent; later calls raise ClosedError.

        In a forked child nothing happens: what the engine holds is the parent's.
        """
        if self._loaded.core.lifetime.in_own_process:
            with self._lock:
                self._loaded.core.close()

    def __enter__(self) -> Engine:
        self._require_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- description --------------------------------------------------------------------------

    def describe(self) -> dict[str, str]:
        """What was loaded, as short texts by name."""
        config, plan = self._loaded.model.config, self._loaded.plan
        formats: dict[str, int] = {}
        for name in self._loaded.formats.values():
            formats[name] = formats.get(name, 0) + 1
        return {
            "model": f"{config.architecture}, {config.num_layers} layers × {config.hidden_size}",
            "file": f"{self.path} ({self.format_name})",
            "weights": ", ".join(f"{count} × {name}" for name, count in sorted(formats.items())),
            "memory": f"{plan.weights / 2**20:.0f} MiB weights, "
            f"{plan.kv_pool / 2**20:.0f} MiB KV ({self._loaded.kv_dtype})",
            "sequence": f"up to {self.max_seq_len} positions",
            "device": f"{self._loaded.core.runtime.fingerprint}, {self.options.threads} threads",
            "state": self._state(),
        }

    def _state(self) -> str:
        lifetime = self._loaded.core.lifetime
        if not lifetime.in_own_process:
            return "of the parent process"
        return "closed" if lifetime.closed else "open"

    def __repr__(self) -> str:
        about = self.describe()
        return f"Engine({about['model']}; {about['device']}; {about['memory']}; {about['state']})"

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>"
            for key, value in self.describe().items()
        )
        return f"<table><caption>atlas.Engine</caption>{cells}</table>"


def _is_single(prompts: object) -> bool:
    """Whether the argument of ``generate`` is one prompt: a text, or ids."""
    if isinstance(prompts, str):
        return True
    if not _is_sequence(prompts) or isinstance(prompts, bytes | bytearray):
        raise InvalidArgumentError(
            f"prompts is a {type(prompts).__name__}; allowed: str, token ids, or a list of these"
        )
    items = list(prompts)  # type: ignore[call-overload]
    if not items:
        raise InvalidArgumentError("prompts is empty; allowed: a prompt of one token or more")
    nested = [_is_sequence(item) for item in items]
    if any(nested) != all(nested):
        raise InvalidArgumentError("prompts mix token ids with prompts; allowed: one or the other")
    return not nested[0]


def _is_sequence(item: object) -> bool:
    """Lists, tuples, texts, and arrays or tensors with an axis; no sets, mappings or iterators."""
    return isinstance(item, Sequence) or getattr(item, "ndim", 0) > 0
