import pytest

from jaxcb.errors import RequestError
from jaxcb.text import Tokenizer, chat

from .small_tokenizers import TEMPLATE, byte_fallback_backend, byte_level_backend, with_bos_and_eos, write_dir

USER = {"role": "user", "content": "the text"}
ANSWER = {"role": "assistant", "content": "an answer"}


def make(template: str | None = TEMPLATE) -> Tokenizer:
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(with_bos_and_eos(byte_level_backend()), config, template)


def test_golden_chats_render_to_the_golden_prompts(builtin_model, golden):
    tokenizer = Tokenizer.from_dir(builtin_model)
    for prompt in golden["prompts"]:
        assert tokenizer.render_chat(prompt["messages"]) == prompt["rendered"]
        assert tokenizer.apply_chat_template(prompt["messages"]) == prompt["prompt_ids"]


@pytest.mark.parametrize("backend", [byte_level_backend, byte_fallback_backend])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("messages", [[USER], [USER, ANSWER, USER], [{"role": "user", "content": ""}]])
def test_ids_equal_those_of_transformers_with_one_bos_and_no_eos_at_the_end(tmp_path, backend, eos, messages):
    """vllm#2012, #27515, llama-cpp-python#1439: template and tokenizer both added the start token."""
    from transformers import PreTrainedTokenizerFast

    path = write_dir(tmp_path, with_bos_and_eos(backend(), eos=eos))
    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    ids = Tokenizer.from_dir(path).apply_chat_template(messages)
    assert ids == expected
    bos, eos_id = (theirs.convert_tokens_to_ids(token) for token in ("<s>", "</s>"))
    assert ids.count(bos) == 1 and ids[0] == bos and ids[-1] != eos_id


def test_generation_prompt_can_be_left_out():
    assert make().render_chat([USER], add_generation_prompt=False) == "<s>[user]the text"


def test_final_message_can_be_left_open():
    text = make("{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}").render_chat(
        [USER, ANSWER], add_generation_prompt=False, continue_final_message=True
    )
    assert text == "[user]the text</s>[assistant]an answer"


def test_open_final_message_and_generation_prompt_exclude_each_other():
    with pytest.raises(RequestError, match="only one") as caught:
        make().render_chat([USER], add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_tools_reach_the_template():
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    assert make(template).render_chat([USER], tools=[tool]) == "weatherthe text"


def test_text_parts_are_joined_by_newlines():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert make().render_chat([{"role": "user", "content": parts}]) == "<s>[user]one\ntwo[assistant]"
    assert make().render_chat([{"role": "user", "content": []}]) == "<s>[user][assistant]"


def test_fields_that_are_none_are_left_out():
    template = "{{ 'name' in messages[0] }}"
    assert make(template).render_chat([{"role": "user", "content": "a", "name": None}]) == "False"


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (None, "must be a list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([USER, {"content": "a"}], r"messages\[1\] needs a string 'role'"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": ["a"]}], r"part of type 'str'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'"),
    ],
)
def test_malformed_messages_are_refused_by_name(messages, reason):
    options = {"tools": None, "special_tokens": {}, "add_generation_prompt": True, "continue_final_message": False}
    with pytest.raises(RequestError, match=reason) as caught:
        chat.render(TEMPLATE, messages, **options)
    assert caught.value.param == "messages"


def test_half_a_surrogate_pair_in_a_message_is_refused():
    with pytest.raises(RequestError, match="surrogate") as caught:
        make().apply_chat_template([{"role": "user", "content": "\ud83d"}])
    assert caught.value.param == "messages"


def test_model_without_a_template_refuses_chat():
    with pytest.raises(RequestError, match="no chat template") as caught:
        make(None).apply_chat_template([USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "refused"),
        ("{{ messages[0].content + 1 }}", "refused"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append"),
    ],
)
def test_template_that_raises_or_reaches_out_refuses_the_request(template, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        make(template).apply_chat_template([USER])
    assert caught.value.param == "messages"


def test_warm_up_survives_templates_that_refuse_its_message():
    make("{{ raise_exception('no') }}").warm_up()
    make(None).warm_up()


def test_rendering_says_nothing_about_a_missing_pytorch():
    import subprocess
    import sys

    code = (
        "from jaxcb.text import chat;"
        "print(chat.render('{{ messages[0].content }}', [{'role': 'user', 'content': 'hi'}], tools=None,"
        " special_tokens={}, add_generation_prompt=True, continue_final_message=False))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("hi\n", "")


THINKING = "{% if enable_thinking is false %}quiet {% endif %}{{ messages[0].content }}"


def test_safe_settings_reach_a_template_that_reads_them():
    tokenizer = make(THINKING)
    assert tokenizer.render_chat([USER]) == "the text"
    assert tokenizer.render_chat([USER], template_kwargs={"enable_thinking": False}) == "quiet the text"
    assert tokenizer.reads("enable_thinking") and not tokenizer.reads("tools")


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("messages", [], "can't be set"),
        ("chat_template", "x", "can't be set"),
        ("tools", [], "can't be set"),
        ("tokenize", False, "can't be set"),
        ("bos_token", "x", "can't be set"),
        ("enable_thinking", "no", "must be of type bool"),
        ("enable_thinking", 1, "must be of type bool"),
        ("date_string", "today", "does not read it"),
    ],
)
def test_other_settings_of_a_template_are_refused_by_name(name, value, reason):
    with pytest.raises(RequestError, match=reason) as caught:
        make(THINKING).render_chat([USER], template_kwargs={name: value})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_special_tokens_are_known_by_their_text():
    assert make().is_special("</s>") and not make().is_special("the")
