"""The one estimate of pages: start-up sizes the pools with it and admission decides with it."""

from __future__ import annotations


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens from the start of a page on."""
    return -(-num_tokens // page_size)


def max_pages_held(num_tokens: int, page_size: int, window: int | None, prefill_chunk: int) -> int:
    """Pages of one KV group that a sequence holds at most on its way to `num_tokens` tokens.

    With a window, head pages go back before every chunk, so the window of the last token before it and the chunk itself
    are held at most; they may start anywhere in a page.
    """
    num_pages = num_pages_for(num_tokens, page_size)
    if window is None:
        return num_pages
    return min(num_pages, _window_pages(page_size, window, prefill_chunk))


def max_tokens_held(num_pages: int, page_size: int, window: int | None, prefill_chunk: int) -> int | None:
    """Tokens that one sequence reaches at most when it has all `num_pages` pages of a KV group; None is no bound."""
    if window is not None and num_pages >= _window_pages(page_size, window, prefill_chunk):
        return None
    return num_pages * page_size


def _window_pages(page_size: int, window: int, prefill_chunk: int) -> int:
    return num_pages_for(window + prefill_chunk - 1, page_size) + 1
