"""Complete a prompt, greedily and with sampling.

python examples/python/generate.py [MODEL]
"""

import sys

import atlas

model = sys.argv[1] if len(sys.argv) > 1 else None  # atlas-tiny, in the package

with atlas.Engine(model) as engine:
    completion = engine.generate("This module provides", atlas.SamplingParams(max_tokens=24))
    print(completion.text)
    print(f"[{completion.finish_reason}, {completion.usage.completion_tokens} tokens]")

    # Several prompts give a list. The same seed gives the same text on every run.
    params = atlas.SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=1)
    for sampled in engine.generate(["To open a file,", "Return a new list"], params):
        print(repr(sampled.text))
