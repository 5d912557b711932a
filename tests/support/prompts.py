"""Thirty-two prompts such as people send: short and long, several scripts, code, lists, numbers."""

from __future__ import annotations

from headrace.engine import Chat, ChatMessage

QUESTIONS = [
    "What is the capital of France? Answer and explain.",
    "Why is the sky blue?",
    "Write a haiku about a water mill.",
    "List five vegetables that can be grown in a small garden.",
    "Explain to a child how a bicycle stays upright.",
    "Translate into Spanish: The train leaves at half past seven.",
    "What is 17 times 23? Show your work.",
    "Write a Python function that reverses a string.",
    (
        "Summarise in one sentence: The committee met three times in March, could not agree on the budget, "
        "and adjourned until the treasurer had gathered the missing figures from the regional offices."
    ),
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet, and when?",
    "Compare cats and dogs as pets.",
    "Write an email that asks for a day off on Friday.",
    "What are the primary colours?",
    "Describe the water cycle in four steps.",
    "Name three rivers in Africa.",
    "How do I boil an egg?",
    "Écrivez une phrase sur l'été à Genève.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "日本の首都はどこですか。",
    "Write a short story that begins with: The lamp went out at 3:15.",
    "What does HTTP stand for?",
    "Fix the grammar: he don't has no money in 2019",
    "Convert 98.6 degrees Fahrenheit to Celsius.",
    "Explain recursion with an example.",
    "What should I pack for a week at the sea?",
    "Give three synonyms of 'happy' and use each in a sentence.",
    "SELECT name FROM users WHERE age > 30; What does this query do?",
    "Make a table of the planets with their number of moons.",
    "Tell me a joke about programmers 🙂",
    "What happened in the year 1969?",
    "def fibonacci(n):\n    # returns the n-th number\n    What is missing here?",
]


def chats() -> list[Chat]:
    """Each question as a conversation of one message."""
    return [Chat((ChatMessage("user", question),)) for question in QUESTIONS]
