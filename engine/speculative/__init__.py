"""Several tokens per step: who proposes them, how many, and what they turn out to be worth."""
