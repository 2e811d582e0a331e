"""``python -m jaxcb.serve``: an OpenAI-compatible HTTP server in the engine's process.

It turns HTTP bodies into :class:`jaxcb.request.Request` and outputs into JSON. What a request means is decided below
this room: nothing here schedules, samples or touches an array, and nothing outside imports it.

The way of a request: ``app`` (routes) -> ``body`` (bytes) -> ``fields``, ``requests`` (checked structs) -> ``chat`` or
``completions`` (tokens in, OpenAI's words out) -> ``service`` (submit, measure) -> ``answer`` (a body, or a stream).
"""
