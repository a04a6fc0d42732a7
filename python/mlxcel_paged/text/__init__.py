"""Text on both sides of the model: prompts into token ids, token ids into text that can be sent."""
