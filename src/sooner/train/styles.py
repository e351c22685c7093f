"""What a target is asked to write, so that it writes what it will be asked for. Knows no model.

All texts of a conversation are written by the target: documents, the rest of a user's turn that begins with
`opening`, the answer, and further turns with theirs. Styles and topics are our own; no data set is behind them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

TOPICS = tuple(
    """a small town library|the history of bread|a football final|a storm at sea|electric cars|an old lighthouse
a school play|volcanoes|the human heart|a robbery in a museum|bees and flowers|a presidential election|a lost dog
the moon landing|a new bridge|learning the piano|a bank in trouble|the ocean floor|a family reunion|a train strike
coffee|a court case|the Roman empire|a wedding in the rain|solar power|a mountain village|vaccines|a film festival
a farmer and his land|computer networks|a haunted house|inflation and prices|dinosaurs|a marathon|fashion
the French revolution|a broken window|whales|a hospital at night|chess|a trip to Japan|space telescopes|a refugee
the water cycle|a famous painter|a football coach|online shopping|a river flood|healthy food|a king and his sons
machine learning|a fire in a factory|migrating birds|the stock market|a chemistry lesson|a pop singer|old trees
the police and a missing girl|a garden in spring|a company and its workers|black holes|a long winter|tax law
a basketball player|the invention of printing|an island in the Pacific|a doctor's advice|a burnt dinner|glaciers
a mayor's speech|video games|the immune system|a ship's captain|a job interview|a desert road|a new phone
a war reporter|the atom|a bus driver|sleep|a prison escape|a charity race|the wolf|a birthday present""".replace(
        "\n", "|"
    ).split("|")
)


@dataclass(frozen=True, slots=True)
class Style:
    """One kind of conversation.

    system: whom the target plays while it writes the user's turn. openings: how that turn may begin; {topic}
    is put in. turn: most tokens the target adds to it, 0 = it is complete. document: what the target is asked
    for first, "" = none; {document} in the turn is what it wrote. passages: how many of them, on different
    topics; size: tokens of one, fewest and most. answer: most tokens of the answer. follow_ups: how the user's
    later turns begin, in the order they may come; each has an answer of its own.
    """

    name: str
    system: str
    openings: tuple[str, ...]
    turn: int = 64
    document: str = ""
    answer: int = 224
    passages: int = 1
    size: tuple[int, int] = (96, 320)
    follow_ups: tuple[str, ...] = ()


_NEWS = "Tell the news story of {topic} in three plain paragraphs."
_ENTRY = "Explain {topic} in three plain paragraphs."
_REPORT = "Write a long and detailed news report about {topic}. Write ten paragraphs."
_CHAPTER = "Write a long and detailed chapter of a textbook about {topic}. Write ten paragraphs."
_PASSAGE = "Write one encyclopedia paragraph about {topic}."
_READER = "The user pastes a text and asks about it."

STYLES = (
    Style(
        "writing",
        "The user asks an assistant to write something.",
        (
            "Write a short story about {topic}",
            "Write an email to",
            "Write a blog post about {topic}",
            "Describe",
            "Compose a poem",
            "Draft",
            "Write a letter in which",
            "Imagine you are",
        ),
    ),
    Style(
        "chat",
        "The user talks with a helpful assistant.",
        (
            "How do I",
            "What should I",
            "Can you explain",
            "I am",
            "Give me",
            "Why",
            "Tell me about {topic}",
            "",
            "My",
        ),
        turn=48,
    ),
    Style(
        "math",
        "The user gives a math word problem with numbers and asks for the result.",
        (
            "Anna has",
            "A shop sells",
            "Tom buys",
            "If a car",
            "There are",
            "A farmer",
            "Every day",
            "The price of",
            "Maria is",
            "A class of",
            "Solve",
            "Ben earns $",
            "In a box there are",
            "How many",
        ),
        turn=80,
        answer=256,
    ),
    Style(
        "question",
        "The user asks a short factual question.",
        (
            "Who",
            "What is",
            "When did",
            "Where is",
            "Which country",
            "What does",
            "How many",
            "Who wrote",
            "What year was",
            "What is the capital of",
            "Who played",
            "Where did",
            "When is",
            "Who is the",
            "Who sang",
        ),
        turn=24,
        answer=128,
    ),
    Style(
        "translation",
        "The user wants a sentence translated into English.",
        (
            "Translate into English: Der",
            "Translate the German sentence into English: Die",
            "Translate from German to English: Das",
            "What does this mean in English? Ich",
            "Translate German to English: Nach",
            "Translate this German text to English: In",
            "Translate into English: Le",
            "Translate from Spanish to English: El",
            "Translate to English: Wir",
            "Translate German to English: Ein",
        ),
        turn=56,
        answer=128,
    ),
    Style(
        "summarization",
        _READER,
        (
            "Summarize: {document}",
            "Summarize this article in a few sentences.\n\n{document}",
            "{document}\n\nGive a short summary of the text above.",
            "TL;DR of the following: {document}",
            "What are the main points of this report?\n{document}",
        ),
        turn=0,
        document=_NEWS,
    ),
    Style(
        "reading",
        _READER,
        (
            "{document}\n\nQuestion:",
            "Read the text and answer. {document}\nWho",
            "Answer with the help of this document.\n\nDocument: {document}\n\nQuestion: What",
            "Context: {document}\n\nUsing the context, answer: when",
            "{document}\n\nBased on the text, how",
        ),
        turn=32,
        document=_ENTRY,
    ),
    Style(
        "rewriting",
        _READER,
        (
            "Rewrite in simpler words: {document}",
            "Make this more formal: {document}",
            "Correct the grammar: {document}",
            "Rewrite the text in the past tense.\n\n{document}",
        ),
        turn=0,
        document="Write one paragraph of five sentences about {topic}.",
    ),
    Style(
        "extraction",
        _READER,
        (
            "List all names and places in this text: {document}",
            "{document}\n\nExtract the facts as a JSON object.",
            "Make a bullet list of what happened, in order.\n\n{document}",
            "Quote the most important sentences of the text.\n\n{document}",
        ),
        turn=0,
        document=_NEWS,
    ),
    Style(
        "technical",
        "The user asks a programmer or scientist.",
        (
            "Write a Python function that",
            "Explain how",
            "What is the difference between",
            "Write a program",
            "Fix",
        ),
        turn=40,
        answer=256,
    ),
    Style(
        "long summarization",
        _READER,
        (
            "Summarize: {document}",
            "Summarize the report below.\n\n{document}",
            "{document}\n\nSummarize this in three sentences.",
            "TL;DR: {document}",
            "{document}\n\nWhat happened? List the key points.",
        ),
        turn=0,
        document=_REPORT,
        size=(300, 800),
    ),
    Style(
        "long reading",
        _READER,
        (
            "{document}\n\nQuestion:",
            "Read the chapter and answer the question. {document}\nQuestion: What",
            "{document}\n\nAccording to the text, why",
            "Here is a text: {document}\n\nUsing it, explain",
        ),
        turn=32,
        document=_CHAPTER,
        size=(300, 800),
    ),
    Style(
        "retrieval",
        "The user gives an assistant some passages and asks one question about them.",
        (
            "Answer the question with the help of these passages.\n\n{document}\n\nQuestion: who",
            "{document}\n\nBased on the passages above, what is",
            "Documents:\n{document}\n\nQuestion: when",
            "Context:\n{document}\n\nQuestion: where",
            "{document}\n\nAnswer from the text only: how many",
        ),
        turn=24,
        document=_PASSAGE,
        passages=4,
        size=(60, 160),
        answer=160,
    ),
    Style(
        "dialogue",
        "The user talks with a helpful assistant and asks further questions.",
        (
            "Can you help me with",
            "I want to learn about {topic}",
            "Write a short text about {topic}",
            "Explain",
            "What do you know about {topic}",
            "Act as",
            "Suggest",
            "Compare",
        ),
        turn=40,
        follow_ups=(
            "Now",
            "Can you",
            "Rewrite",
            "And",
            "Why",
            "Thank you. What",
            "Shorten",
            "How",
            "Make it",
            "Give me",
        ),
    ),
)
# How often each style comes; those with documents cost most, and quote most.
_WEIGHTS = {
    "writing": 3,
    "chat": 4,
    "math": 4,
    "question": 4,
    "translation": 3,
    "summarization": 2,
    "reading": 2,
    "long summarization": 2,
    "long reading": 1,
    "retrieval": 3,
    "dialogue": 4,
}


def pick(dice: random.Random) -> tuple[Style, str, str]:
    """A style, an opening of it and a topic."""
    style = dice.choices(STYLES, [_WEIGHTS.get(style.name, 1) for style in STYLES])[0]
    return style, dice.choice(style.openings), dice.choice(TOPICS)
