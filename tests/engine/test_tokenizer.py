"""The checkpoint's tokenizer and chat template, and what is wrong with them."""

import json
import shutil
from pathlib import Path

import pytest

from appliance.engine.tokenizer import ChatTemplateRefusal, Tokenizer, load_tokenizer
from appliance.errors import ConfigError
from tests.engine.checkpoints import END, small_tokenizer


def test_a_conversation_is_written_by_the_template_and_left_open_for_the_assistant(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    ids = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert small_tokenizer().decode(ids) == f"<|im_start|>user\nhello{END}\n<|im_start|>assistant\n"
    assert tokenizer.end_id == small_tokenizer().eos_token_id


def test_decoding_leaves_special_tokens_and_spaces_alone(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    ids = [*tokenizer.encode("a , b . do n't"), small_tokenizer().eos_token_id]
    assert tokenizer.decode(ids) == "a , b . do n't"


def test_what_the_template_refuses_is_told(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    with pytest.raises(ChatTemplateRefusal, match="the user speaks first"):
        tokenizer.encode_chat([{"role": "assistant", "content": "hello"}])


@pytest.mark.parametrize(
    "template", ["{{ messages[7].content }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{% for", "{{ x.y.z }}"]
)
def test_a_template_that_does_not_work_is_a_refusal_and_not_a_crash(checkpoint: Path, template: str) -> None:
    tokenizer = changed(checkpoint, chat_template=template)
    with pytest.raises(ChatTemplateRefusal):
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])


def test_a_checkpoint_without_a_template_says_so(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    assert not load_tokenizer(tmp_path).has_chat_template
    assert load_tokenizer(checkpoint).has_chat_template


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"{", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "X"}}']
)
def test_a_broken_tokenizer_is_refused_by_place(checkpoint: Path, tmp_path: Path, content: bytes) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in caught.value.message


def test_a_missing_tokenizer_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_length_that_a_tokenizer_was_saved_with_cuts_no_prompt(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    assert load_tokenizer(tmp_path).encode("weights " * 50) == load_tokenizer(checkpoint).encode("weights " * 50)


def test_a_tokenizers_own_code_is_never_run(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    trap = tmp_path / "ran"
    (tmp_path / "custom.py").write_text(f"open({str(trap)!r}, 'w')\nclass Tok: pass\n")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["custom.Tok", "custom.Tok"]}, "tokenizer_class": "Tok"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    try:
        load_tokenizer(tmp_path)
    except ConfigError as error:
        assert "custom" in error.message or "code" in error.message
    assert not trap.exists()


def changed(checkpoint: Path, *, chat_template: str) -> Tokenizer:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(checkpoint)
    theirs.chat_template = chat_template
    return Tokenizer(theirs)
