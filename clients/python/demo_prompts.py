"""The twenty requests of the demo: what people ask, with answers of very different lengths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """One request; `num_tokens` is exactly how many tokens are made, whatever the model would like."""

    question: str
    num_tokens: int


DEMO_REQUESTS = (
    DemoRequest("What is the capital of Japan?", 12),
    DemoRequest("Write a short story about a robot who learns to paint.", 200),
    DemoRequest("How many days are in a week?", 12),
    DemoRequest("Explain how a bicycle stays upright.", 96),
    DemoRequest("Give me three names for a pet cat.", 32),
    DemoRequest("Why is the sky blue?", 72),
    DemoRequest("What is the largest ocean on Earth?", 24),
    DemoRequest("List five healthy breakfast ideas.", 88),
    DemoRequest("What is the opposite of hot?", 16),
    DemoRequest("Describe a walk through an old library.", 160),
    DemoRequest("What does a compiler do?", 56),
    DemoRequest("What is a good name for a boat?", 36),
    DemoRequest("Write a polite email that asks for a day off.", 120),
    DemoRequest("Name the planets of the solar system.", 48),
    DemoRequest("How do I make a cup of tea?", 64),
    DemoRequest("Tell me a fun fact about octopuses.", 40),
    DemoRequest("Explain gravity to a child.", 104),
    DemoRequest("Write a two-line poem about the moon.", 28),
    DemoRequest("Give me tips for learning a new language.", 144),
    DemoRequest("Write one sentence about the sea.", 20),
)
