"""OpenAI's client for node: ``npm install openai`` somewhere, and NODE_PATH to its node_modules."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.serve.process import ServerProcess

SCRIPT = """
const { OpenAI } = require("openai");
(async () => {
  const client = new OpenAI({ baseURL: process.argv[1] + "/v1", apiKey: "none", maxRetries: 0 });
  const body = { model: "tiny", messages: [{ role: "user", content: "hi" }], temperature: 0, max_tokens: 12 };
  const whole = await client.chat.completions.create(body);
  let text = "", usage = null;
  const streaming = { stream: true, stream_options: { include_usage: true } };
  const stream = await client.chat.completions.create({ ...body, ...streaming });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  let refused = null;
  try {
    await client.completions.create({ model: "tiny", prompt: "a", suffix: "b" });
  } catch (error) {
    refused = error.param;
  }
  console.log(JSON.stringify({ whole: whole.choices[0].message.content, text, usage, refused }));
})();
"""


def test_a_stream_with_usage(server: ServerProcess, quiet: dict[str, str]) -> None:
    node = shutil.which("node")
    if node is None or subprocess.run([node, "-e", 'require("openai")'], env=quiet, capture_output=True).returncode:
        pytest.skip("node can't find openai: npm install openai, and set NODE_PATH to its node_modules")
    result = subprocess.run(
        [node, "-e", SCRIPT, server.url], env=quiet, capture_output=True, text=True, timeout=60, check=True
    )
    said = json.loads(result.stdout)
    assert said["text"] == said["whole"] != ""
    assert said["usage"]["completion_tokens"] <= 12
    assert said["refused"] == "suffix"
