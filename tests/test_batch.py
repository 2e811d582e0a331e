"""``python -m jaxcb.generate --input --output``: every line has its answer, once, however often it is begun."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json

import pytest

from jaxcb import batch
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError, EngineStoppedError
from jaxcb.serve.app import make_app
from tests.engine.conftest import backend, make_engines, params, tokenizer  # noqa: F401  # fixtures


@pytest.fixture(scope="module")
def app(make_engines):  # noqa: F811  # the fixture
    return make_app(make_engines())


@pytest.fixture
def served(make_engines, monkeypatch):  # noqa: F811  # the fixture
    """What ``batch.main`` starts is the engine that the tests share."""
    engine = make_engines()
    monkeypatch.setattr(engine.tokenizer, "chat_template", engine.tokenizer.chat_template)  # put back afterwards
    monkeypatch.setattr(Engine, "start", lambda config, progress: contextlib.nullcontext(engine))
    return engine


def line(name: object, **changes: object) -> str:
    body = {"prompt": "the end", "max_tokens": 3, "temperature": 0} | changes.pop("body", {})
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} | changes)


def answer(app, source, done=()) -> dict[str, dict]:
    output = io.BytesIO()
    asyncio.run(batch.run(app, source, output, set(done), progress=False))
    lines = [json.loads(text) for text in output.getvalue().splitlines()]
    assert len({entry["custom_id"] for entry in lines}) == len(lines)
    return {entry["custom_id"]: entry for entry in lines}


def test_every_line_is_answered_as_the_server_would(app):
    source = [line("a"), "", line("b", body={"prompt": [5, 6, 7], "n": 2, "temperature": 1.0, "seed": 3}), line("c")]
    answers = answer(app, source)
    assert answers.keys() == {"a", "b", "c"}
    for entry in answers.values():
        assert entry["error"] is None and entry["response"]["status_code"] == 200
        assert entry["response"]["request_id"] == entry["response"]["body"]["id"]
    assert len(answers["b"]["response"]["body"]["choices"]) == 2
    assert answers["a"]["response"]["body"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        (json.dumps({"url": "/v1/completions", "body": {}}), "custom_id"),
        (line("x", url="/v1/nowhere"), "nowhere"),
        (line("x", method="GET"), "POST"),
        (line("x", body=[]) if False else json.dumps({"custom_id": "x", "url": "/v1/completions", "body": []}), "body"),
        (line("x", body={"stream": True}), "stream"),
        (line("a"), "'a' of a line before"),
        ('{"custom_id": "x", "body": ' + "[" * 100_000, "not JSON"),
        (line("x") + "\udcff", "not UTF-8"),  # a byte 255, as the file is read
    ],
)
def test_a_bad_line_has_an_error_and_the_others_their_answers(app, text, reason):
    answers = answer(app, [line("a"), text, line("b")])
    assert len(answers) == 3
    [bad] = [entry for name, entry in answers.items() if name not in ("a", "b")]
    assert bad["response"] is None and reason in bad["error"]["message"]


def test_a_custom_id_comes_back_whatever_it_is(app):
    assert answer(app, [line("\ud800"), line('\u2028\n"é')]).keys() == {"\ud800", '\u2028\n"é'}


def test_what_the_server_refuses_is_an_answer_with_its_status(app):
    answers = answer(app, [line("a", body={"max_tokens": -1}), line("b")])
    assert answers["a"]["response"]["status_code"] == 400
    assert answers["a"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert answers["b"]["response"]["status_code"] == 200


def test_a_failure_of_the_engine_is_no_answer(monkeypatch):
    """Or a run that is begun again would leave out what it was too late for."""
    answers = iter([(200, b'{"id": "x"}'), (429, b""), (200, b'{"id": "y"}'), (503, b'{"error": {"message": "gone"}}')])

    async def post(app, path, body):
        return next(answers)

    monkeypatch.setattr(batch, "post", post)
    monkeypatch.setattr(batch, "OPEN_AT_ONCE", 1)
    output = io.BytesIO()
    with pytest.raises(EngineStoppedError, match="gone"):
        asyncio.run(batch.run(None, [line(name) for name in "abcd"], output, set(), progress=False))
    assert [json.loads(text)["custom_id"] for text in output.getvalue().splitlines()] == ["a", "b"]


def test_no_more_lines_are_read_than_the_window_holds(app, monkeypatch):
    monkeypatch.setattr(batch, "OPEN_AT_ONCE", 2)
    read = []
    running = []

    async def slow(app, name, entry):
        running.append(name)
        assert len(running) <= 2 and len(read) <= len(finished) + 3
        await asyncio.sleep(0)
        running.remove(name)
        finished.append(name)
        return {"custom_id": name, "response": None}

    finished: list[str] = []
    monkeypatch.setattr(batch, "_answer", slow)
    answer(app, (read.append(i) or line(str(i)) for i in range(30)))
    assert sorted(map(int, finished)) == list(range(30))


def test_a_run_goes_on_where_the_last_one_was_cut_off(tmp_path, make_engines, monkeypatch):  # noqa: F811
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line(str(i)) for i in range(5)))
    started = []

    class Running:
        def __enter__(self):
            return make_engines()

        def __exit__(self, *exc):
            pass

    monkeypatch.setattr(Engine, "start", lambda config, progress: started.append(config) or Running())
    arguments = ["--input", str(source), "--output", str(output), "--quiet", "--max-num-seqs", "4"]
    assert batch.main(arguments) == 0
    assert started[0].max_num_seqs == 4
    lines = output.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    output.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    assert batch.main(arguments) == 0
    names = [json.loads(text)["custom_id"] for text in output.read_text().splitlines()]
    assert len(names) == 5 and set(names) == {"0", "1", "2", "3", "4"}
    assert output.read_bytes().startswith(b"".join(lines[:2]))
    assert batch.main(arguments) == 0 and output.read_text().count("\n") == 5
    source.write_text(source.read_text() + "\n{}\n")
    assert batch.main(arguments) == 1
    assert batch.main(arguments) == 1, "a refusal of an earlier run counts"
    assert output.read_text().count("\n") == 6


def test_a_file_of_something_else_is_not_written_to(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("my notes\nmore\n")
    with pytest.raises(ConfigError, match="line 1"):
        batch.answered(file)
    assert batch.main(["--input", str(file), "--output", str(file)]) == 2
    assert file.read_text() == "my notes\nmore\n"


def test_bytes_that_are_no_text_cost_their_own_line_alone(tmp_path, served):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + line("a").encode() + b"\n\xff\n" + line("b").encode())
    assert batch.main(["--input", str(source), "--output", str(output), "--quiet"]) == 1
    answers = {entry["custom_id"]: entry for entry in map(json.loads, output.read_text().splitlines())}
    assert answers.keys() == {"a", "line-2", "b"}
    assert "not UTF-8" in answers["line-2"]["error"]["message"] and answers["a"]["error"] is None


def test_template_and_parsers_are_those_of_the_flags(tmp_path, served):
    source, output, template = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "template.jinja"
    template.write_text("the end {{ nowhere.at_all }}")
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    source.write_text(json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body}))
    files = ["--input", str(source), "--output", str(output), "--quiet"]
    assert batch.main([*files, "--tool-call-parser", "nonsense"]) == 2
    assert batch.main([*files, "--reasoning-parser", "nonsense"]) == 2
    assert not output.exists()
    assert batch.main([*files, "--chat-template", str(template)]) == 1
    assert "nowhere" in output.read_text()


@pytest.mark.parametrize("flag", ["--port=1", "--host=a", "--api-key=k", "--admin-api-key=k", "--profile=dir"])
def test_flags_of_a_server_alone_are_refused(tmp_path, capsys, flag):
    assert batch.main(["--input", str(tmp_path), "--output", str(tmp_path / "out"), flag]) == 2
    assert flag.split("=")[0] in capsys.readouterr().err
