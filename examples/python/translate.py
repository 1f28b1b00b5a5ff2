"""Translate: several texts at once, the best few of one, and a text as it is generated.

python examples/python/translate.py MODEL [SOURCE] [TARGET]

MODEL is a folder of NLLB-200 or M2M100; SOURCE and TARGET are codes of its languages.
"""

import sys

import atlas

if len(sys.argv) < 2:
    sys.exit(f"usage: {sys.argv[0]} MODEL [SOURCE] [TARGET]")
source = sys.argv[2] if len(sys.argv) > 2 else "eng_Latn"
target = sys.argv[3] if len(sys.argv) > 3 else "deu_Latn"

with atlas.Engine(sys.argv[1]) as engine:
    print(f"{len(engine.languages)} languages")

    # Beam search, four beams. Texts share every sweep over the weights.
    texts = ["The weather is nice today.", "Where is the station?"]
    for translation in engine.translate(texts, source=source, target=target):
        print(translation.text)

    # The three best of eight, with scores.
    best = engine.translate(
        texts[0], source=source, target=target, num_beams=8, num_return=3, length_penalty=1.2
    )
    for hypothesis in best.hypotheses:
        print(f"{hypothesis.score:.3f} {hypothesis.text}")

    # One beam is greedy, and gives its text out token by token.
    engine.submit_translation(texts[1], source=source, target=target, num_beams=1)
    while engine.has_unfinished():
        for event in engine.step():
            print(event.text, end="|", flush=True)
    print()
