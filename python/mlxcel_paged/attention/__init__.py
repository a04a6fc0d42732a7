"""Paged attention: the choice of a path per launch, its backends, and the public one-shot and plan APIs."""
