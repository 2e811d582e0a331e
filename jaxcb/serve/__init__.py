"""``python -m jaxcb.serve``: an HTTP server in the engine's process, for the clients of OpenAI and Anthropic.

It turns HTTP bodies into :class:`jaxcb.request.Request` and outputs into JSON. What a request means is decided below
this room: nothing here schedules, samples or touches an array, and nothing outside imports it.

The way of a request: ``endpoints`` (the table of routes) -> ``body`` (bytes) -> ``fields``, ``requests`` (checked
structs) -> ``chat``, ``completions``, ``responses_fields`` or ``anthropic_fields`` (through ``conversation`` to token
ids: a ``call``) -> ``service`` (submit, measure) -> ``answer`` (a body or a stream, in the words of ``chat_answer`` and
its like).
"""
