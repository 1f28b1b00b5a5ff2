"""Print text while it is generated, and stop in the middle: leaving the loop cancels the rest.

python examples/python/stream.py [MODEL]
"""

import sys

import atlas

model = sys.argv[1] if len(sys.argv) > 1 else None  # atlas-tiny, in the package
sentences = 0

with atlas.Engine(model) as engine:
    for delta in engine.stream("To open a file,", atlas.SamplingParams(max_tokens=200)):
        print(delta.text, end="", flush=True)
        sentences += delta.text.count(".")
        if sentences == 2:
            break
    print()

    # The engine is free for the next request at once.
    print(engine.generate("def main():", atlas.SamplingParams(max_tokens=12)).text)
