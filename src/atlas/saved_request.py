"""The JSON that a saved request keeps beside its tokens and KV, and the request made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from atlas.errors import InvalidArgumentError
from atlas.live_request import LiveRequest
from atlas.request import TokenLogprob
from atlas.sampler import Sampled
from atlas.sampling import SamplingParams

_FIELDS = {"params", "last_token", "position", "logprobs", "prompt_logprobs", "cached_tokens"}


def describe_request(request: LiveRequest) -> bytes:
    """The section of a running request with one sample."""
    generation = request.generations[0]
    params = request.params.to_mapping()
    if "logit_bias" in params:
        params["logit_bias"] = list(params["logit_bias"].items())  # JSON's keys are texts
    fields = {
        "params": params,
        "last_token": generation.last_token,
        "position": len(request.prompt_ids) + generation.num_tokens,
        "logprobs": [[s.logprob, s.top] for s in generation.chosen]
        if request.params.logprobs is not None
        else None,
        "prompt_logprobs": [[s.token_id, s.logprob, s.top] for s in request.prompt_logprobs],
        "cached_tokens": request.cached_tokens,
    }
    return json.dumps(fields).encode()


def restore_request(
    section: bytes,
    prompt: list[int],
    output: list[int],
    make: Callable[[SamplingParams], LiveRequest],
) -> LiveRequest:
    """A request that has all its output again: sampler, text and stops are replayed.

    Parameters
    ----------
    section : bytes
        What :func:`describe_request` gave, or what a hostile file holds instead.
    prompt, output : list of int
        The file's tokens; the last one, which has no KV, is in ``section``.
    make : callable
        From parameters to a request without output.

    Raises
    ------
    InvalidArgumentError
        Something in the section cannot be; the message names it.
    """
    fields = _fields(section)
    params = _params(fields["params"])
    output = [*output, _integer("last_token", fields["last_token"])]
    if fields["position"] != len(prompt) + len(output):
        raise InvalidArgumentError(
            f"position of the saved sampler is {fields['position']!r}; "
            f"allowed: {len(prompt) + len(output)}, the number of tokens"
        )
    request = make(params)
    request.generations[0].replay(_chosen(output, params, fields["logprobs"]))
    if params.prompt_logprobs is not None:
        scores = _logprobs("prompt_logprobs", fields["prompt_logprobs"])
        if [score.token_id for score in scores] != prompt:
            raise InvalidArgumentError("prompt_logprobs of the saved request are not its own")
        request.prompt_logprobs = scores
    request.cached_tokens = _integer("cached_tokens", fields["cached_tokens"])
    if request.cached_tokens > len(prompt):
        raise InvalidArgumentError(
            f"cached_tokens is {request.cached_tokens}; allowed: 0 … {len(prompt)}"
        )
    request.resumed = True
    return request


def _fields(section: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(section)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"section 'request' is no JSON: {error}") from None
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        raise InvalidArgumentError(
            f"section 'request' has other fields; allowed: {', '.join(sorted(_FIELDS))}"
        )
    return fields


def _params(mapping: Any) -> SamplingParams:
    if not isinstance(mapping, dict):
        raise InvalidArgumentError("params of the saved request are no mapping")
    changed = dict(mapping)
    try:
        if "logit_bias" in changed:
            changed["logit_bias"] = dict(changed["logit_bias"])
        params = SamplingParams.from_mapping(changed)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"params of the saved request: {error}") from error
    if params.n != 1:
        raise InvalidArgumentError(f"n of the saved request is {params.n}; allowed: 1")
    return params


def _chosen(output: list[int], params: SamplingParams, scores: Any) -> list[Sampled]:
    if params.logprobs is None:
        return [Sampled(token) for token in output]
    if not isinstance(scores, list) or len(scores) != len(output):
        raise InvalidArgumentError(f"logprobs of the saved request are not {len(output)} items")
    named = [
        [token, *score] if isinstance(score, list) else score
        for token, score in zip(output, scores, strict=True)
    ]
    return [
        Sampled(best.token_id, best.logprob, list(best.top))
        for best in _logprobs("logprobs", named)
    ]


def _logprobs(name: str, items: Any) -> list[TokenLogprob]:
    """``[id, logprob or None, [[id, logprob], …]]`` each."""
    try:
        return [
            TokenLogprob(
                _integer(name, token),
                None if logprob is None else float(logprob),
                tuple((_integer(name, other), float(value)) for other, value in top),
            )
            for token, logprob, top in items
        ]
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name} of the saved request are malformed: {error}") from error


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise InvalidArgumentError(f"{name} holds {value!r}; allowed: an integer, 0 … 2**31 - 1")
    return value
