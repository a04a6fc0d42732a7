"""Measures servers as clients see them: arms that take turns, requests in vLLM's terms, and proof of the path taken."""
