"""Drive the model by hand: prefill, decode, then verify drafted tokens and roll back.

Speculative decoding rests on one promise: K tokens run in one sweep give bitwise the logits that
K single steps give, and rows that are not accepted leave no trace. Both are checked here.

    python examples/python/verify_by_hand.py [MODEL]
"""

import sys

import numpy as np

import atlas

model_name = sys.argv[1] if len(sys.argv) > 1 else None  # atlas-tiny, in the package

with atlas.Engine(model_name) as engine:
    model, tokenizer = engine.model, engine.tokenizer
    prompt = tokenizer.encode("The quick start ")

    # One token at a time.
    serial = model.lifecycle.alloc_sequence()
    view = model.forward.prefill(prompt, serial)
    tokens, rows = [], []
    for _ in range(5):
        tokens.append(model.logits.argmax(view))
        view = model.forward.decode(tokens[-1], serial)
        rows.append(np.asarray(view)[0])
    print("serial:  ", repr(tokenizer.decode(tokens)))

    # The same tokens in one sweep, as a verify.
    drafted = model.lifecycle.alloc_sequence()
    model.forward.prefill(prompt, drafted)
    result = model.verify.decode_verify(tokens, drafted)
    print("bitwise equal to serial:", np.array_equal(result.logits.numpy(), rows))

    # Keep the first three rows and go on from there: the fourth and fifth never happened.
    model.verify.accept(drafted, 3)
    print("positions after accept: ", drafted.seq_len, "=", len(prompt), "+ 3")
    again = model.forward.decode(tokens[3], drafted)
    print("same row after rollback:", np.array_equal(np.asarray(again)[0], rows[3]))
