"""GET /: the status page. Everything that it loads comes from this package, and its policy allows nothing else."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
INDEX = "index.html"


def page_routes() -> list[Route]:
    """The page at / and its files under /assets. The files are read once, here; no other path leads to any."""
    routes = []
    for asset in sorted((files(__package__) / "assets").iterdir(), key=lambda asset: asset.name):
        suffix = asset.name.rpartition(".")[2]
        if suffix in _MEDIA_TYPES:
            path = "/" if asset.name == INDEX else f"/assets/{asset.name}"
            routes.append(Route(path, _Asset(asset.read_bytes(), _MEDIA_TYPES[suffix]).endpoint, methods=["GET"]))
    return routes


class _Asset:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content = content
        self._media_type = media_type

    async def endpoint(self, _request: Request) -> Response:
        """One file of the page."""
        return Response(self._content, media_type=self._media_type, headers=_HEADERS)
