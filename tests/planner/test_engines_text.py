"""The text of configuration files: comments and trailing commas as DeepSpeed takes them, and one line for what is broken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memplan.errors import UserError
from memplan.planner.engines.text import parse_json, read_file, strip_extensions

WITH_COMMENTS = """{
  # the stage
  "zero_optimization": {"stage": 2, // two
    "reduce_bucket_size": 5e8, /* half a
    billion */
  },
  "path": "http://a/b#c /* no comment */, }",
}"""


def test_comments_and_trailing_commas_are_read_as_hjson_reads_them():
    hjson = pytest.importorskip("hjson")

    read = parse_json(WITH_COMMENTS, "ds.json")

    assert read.data == hjson.loads(WITH_COMMENTS)
    assert not read.plain


def test_a_plain_file_is_said_to_be_plain():
    assert parse_json('{"a": 1}', "ds.json").plain


def test_keys_without_quotes_are_read_where_hjson_is_installed():
    pytest.importorskip("hjson")

    assert parse_json("{train_batch_size: 4\n zero_optimization: {stage: 2}}", "ds.json").data["train_batch_size"] == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1', "line 1, column 8"),
        ('{\n  "a": 1,\n  "b": ,\n}', "line 3, column 8"),
        ('{"a": 1}}', "line 1, column 9"),
        ('{"a": 1, // one\n "b" 2}', "line 2, column 6"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
        ('{"a": 1, /* c */ "a": 2,}', "the key 'a' is there twice"),
        ("[1, 2]", "holds a list"),
        ("", "holds nothing"),
        ("null", "holds nothing"),
    ],
)
def test_broken_json_is_one_line_that_says_where(text, said):
    with pytest.raises(UserError) as error:
        parse_json(text, "ds.json")

    assert str(error.value).startswith("ds.json: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", b"a: [1, 2\nb: 3", "line 2, column 2"),
        ("a.yml", b"- 1\n- 2", "holds a list"),
        ("a.json", b"\xff\xfe\x00", "not text"),
    ],
)
def test_what_is_no_yaml_or_no_text_is_said(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)

    with pytest.raises(UserError, match=said):
        read_file(tmp_path / name)


def test_a_folder_and_a_missing_file_are_said(tmp_path):
    with pytest.raises(UserError, match="is not a file"):
        read_file(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        read_file(tmp_path / "none.json")


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    (tmp_path / "ds.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')

    assert read_file(tmp_path / "ds.json").data == {"a": 1}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(value=_JSON, indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_plain_json_is_left_as_it_is(value, indent, ascii_only):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)

    assert strip_extensions(text) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet='{}[]",:/*# \n\\a1', max_size=40))
def test_whatever_is_stripped_every_character_keeps_its_place(text):
    stripped = strip_extensions(text)

    assert len(stripped) == len(text)
    assert all(new == old or (new == " " and old != "\n") for old, new in zip(text, stripped, strict=True))


def test_a_key_that_is_twice_in_a_yaml_file_is_a_mistake_with_both_lines(tmp_path):
    (tmp_path / "a.yml").write_text("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n")

    with pytest.raises(UserError, match=r"'c' is there twice, in lines 3 and 5"):
        read_file(tmp_path / "a.yml")


def test_the_lines_of_keys_are_those_of_the_file(tmp_path):
    (tmp_path / "a.yml").write_text("# what\na: 1\nb:\n  c: [1, {d: 2}]\n")

    assert read_file(tmp_path / "a.yml").lines == {("a",): 2, ("b",): 3, ("b", "c"): 4, ("b", "c", "d"): 4}


def test_aliases_of_aliases_are_looked_at_once(tmp_path):
    lines = ["a0: &a0 [1]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    (tmp_path / "a.yml").write_text("\n".join(lines))

    assert len(read_file(tmp_path / "a.yml").data) == 40


@pytest.mark.parametrize("indent", ["  ", "\t", ""])
def test_the_lines_of_keys_of_json_are_known_too(indent):
    text = f'{{\n{indent}"a": 1, // what\n{indent}"b": {{\n{indent}"c": [{{"d": 1}}]}}\n}}'

    assert parse_json(text, "a.json").lines == {("a",): 2, ("b",): 3, ("b", "c"): 4, ("b", "c", "d"): 4}
