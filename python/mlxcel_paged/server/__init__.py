"""An OpenAI-compatible HTTP server over an engine: it owns requests and text, and nothing of the model."""
