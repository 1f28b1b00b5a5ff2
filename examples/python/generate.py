"""Complete a prompt, greedily and with sampling.

python examples/python/generate.py [MODEL]
"""

import sys

import atlas

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"

with atlas.Engine(model) as engine:
    completion = engine.generate("The capital of France is", atlas.SamplingParams(max_tokens=24))
    print(completion.text)
    print(f"[{completion.finish_reason}, {completion.usage.completion_tokens} tokens]")

    # Several prompts give a list. The same seed gives the same text on every run.
    params = atlas.SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=1)
    for sampled in engine.generate(["Once upon a time", "A short recipe:"], params):
        print(repr(sampled.text))
