"""Prose whose perplexity is measured, and prompts that are continued."""

TEXT = """\
The lighthouse at the end of the peninsula had not been lit for eleven years when the council \
decided to sell it. Nobody in the village could remember a vote about it, and the notice that was \
pinned to the door of the post office gave only a date, a telephone number and a price that made \
the older fishermen laugh. For most of them the tower was a landmark rather than a building: you \
kept it over the church until the water changed colour, and then you turned for the harbour. What \
happened inside it was a matter for the government, like taxes or the weather forecast.

Marta Lindqvist read the notice twice. She had come to the coast to finish a book about bridges, \
had written four pages in as many weeks, and was looking for a reason to stop. The telephone was \
answered by a clerk who seemed surprised that anybody had called. Yes, the tower was for sale. \
Yes, the stairs were safe, or had been when they were last inspected. No, there was no water, but \
there was a well, and the electricity could be connected again for a fee that he would have to \
look up. She asked whether the lamp was still there. There was a long pause, and she heard him \
turning pages. The lamp, he said at last, was listed as an instrument, and instruments belonged \
to the museum in the capital. But nobody had ever come to collect it.

On the first dry morning she walked out along the sea wall with the key in her pocket. The door \
was swollen and had to be pushed with a shoulder. Inside, the air smelled of salt, paint and cold \
iron, and the light fell through the narrow windows in bars that climbed the wall as the sun rose. \
She counted the steps, because her father had taught her to count steps: one hundred and \
forty-two, with three landings. On each landing there was a cupboard, and in each cupboard a row \
of glass jars, washed and empty, as though somebody had been expected to return and fill them.

The lamp was larger than she had imagined. It stood in a cage of prisms, each as thick as a loaf \
of bread, and when she wiped one with her sleeve the whole room broke into colours. She \
understood then why the keepers had written so little in their books. There were columns for oil, \
for wind and for passing ships, and under the heading of remarks there was, for most nights of a \
century, a single word: clear. It was not that nothing had happened. It was that everything that \
mattered had been said by the light itself, every nine seconds, to people whom the keepers would \
never meet.

She bought the tower in the spring. The fishermen stopped laughing when they saw the scaffolding, \
and by the end of the summer two of them had been hired to repair the roof. In October a letter \
came from the museum, asking very politely about the lamp. Marta wrote back that it could be \
visited at any time, that the stairs were safe, and that visitors should bring something to put \
in the jars.
"""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a lower temperature on a mountain because",
    "Dear Professor Okafor,\n\nThank you very much for",
)
