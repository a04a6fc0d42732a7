"""Measurements behind the numbers in the documentation: each module measures one thing and returns a JSON document."""
