"""Print text while it is generated, and stop in the middle: leaving the loop cancels the rest.

python examples/python/stream.py [MODEL]
"""

import sys

import atlas

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
sentences = 0

with atlas.Engine(model) as engine:
    for delta in engine.stream(
        "The history of computing began", atlas.SamplingParams(max_tokens=200)
    ):
        print(delta.text, end="", flush=True)
        sentences += delta.text.count(".")
        if sentences == 2:
            break
    print()

    # The engine is free for the next request at once.
    print(engine.generate("Two plus two is", atlas.SamplingParams(max_tokens=4)).text)
