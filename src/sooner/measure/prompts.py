"""Prompts for those who bring none: short, of several kinds. Knows no model.

Some ask for text that quotes the prompt (there a lookup finds much), some for new text (there it finds little).
"""

from __future__ import annotations

from collections.abc import Mapping

from sooner.measure.workload import Question

_LETTER = (
    "Dear library, I borrowed the blue atlas on the third of May and I has returned it on the tenth of May. "
    "Yesterday a letter came that say the blue atlas is still missing. Please look on the shelf for "
    "returned books. The blue atlas have a torn cover and a green sticker."
)
_REPORT = (
    "The bridge over the Orlo was closed on Monday after engineers found a crack in the second pillar. The "
    "crack is eleven centimetres long. The town expects the bridge over the Orlo to stay closed for six weeks. "
    "Buses will take the old road through Senn, which adds twenty minutes to the trip. Ferries run every hour."
)
_CODE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(value)
"""

_TEXTS: Mapping[str, tuple[str, ...]] = {
    "editing": (
        f"Correct the grammar of this letter and change nothing else:\n\n{_LETTER}",
        f"Find the mistake in this function and write it again without the mistake:\n\n{_CODE}",
        "Turn this list into a numbered list: apples, pears, plums, quinces, cherries, apricots.",
    ),
    "summary": (
        f"Summarise this report in two sentences:\n\n{_REPORT}",
        f"Answer from the report only. How long will the bridge be closed, and what do buses do?\n\n{_REPORT}",
    ),
    "code": (
        "Write a Python function that counts the words of a text and returns a dictionary.",
        "Write an SQL query that lists the ten customers with the most orders in 2023.",
    ),
    "reasoning": (
        "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Explain step by step.",
        "Which is heavier: three boxes of 450 grams each, or one box of 1.4 kilograms?",
    ),
    "writing": (
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        "Describe a rainy morning in a small town by the sea.",
        "Give five tips for somebody who learns to ride a bicycle as an adult.",
    ),
    "facts": (
        "Why is the sky blue in the day and red in the evening?",
        "Explain what a black hole is to a child of ten.",
        "Translate into German: The museum opens at nine and closes at six.",
        "What are the main differences between bees and wasps?",
    ),
}

PROMPTS = tuple(
    Question(f"{category}-{number}", category, (text,))
    for category, texts in _TEXTS.items()
    for number, text in enumerate(texts, 1)
)
