"""A conversation of two turns: the second question only makes sense after the first.

python examples/python/chat.py [MODEL]
"""

import sys

import atlas

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
params = atlas.SamplingParams(max_tokens=48)
messages = [{"role": "system", "content": "You answer in one sentence."}]

with atlas.Engine(model) as engine:
    for question in ("What is the capital of France?", "What is it famous for?"):
        messages.append({"role": "user", "content": question})
        answer = engine.chat(messages, params)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"> {question}\n{answer.text}\n")
