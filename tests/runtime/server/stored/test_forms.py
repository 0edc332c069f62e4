"""Forms: names of files in every way in which clients write them, and forms that would take long to read."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.server.errors import HTTPError
from radixlm.runtime.server.stored.forms import MAX_FIELDS, MAX_HEAD_BYTES, read_form

FORM = "multipart/form-data; boundary=b"


def field(disposition: bytes, content: bytes = b"x") -> bytes:
    return b"--b\r\nContent-Disposition: form-data; " + disposition + b"\r\n\r\n" + content + b"\r\n"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ('filename="a b.jsonl"', "a b.jsonl"),
        ('filename="Größe 数.jsonl"', "Größe 数.jsonl"),
        ("filename=größe.jsonl", "größe.jsonl"),
        ("filename*=UTF-8''Gr%C3%B6%C3%9Fe%20%E6%95%B0.jsonl", "Größe 数.jsonl"),
        ("filename*=iso-8859-1'de'Gr%F6%DFe.jsonl", "Größe.jsonl"),
        ("filename=\"?\"; filename*=utf-8''%E6%95%B0", "数"),
        (r'filename="a\"b\\c"', r'a"b\c'),
        (r'filename="\"a\""', '"a"'),
        ("filename*=UTF-8''%FF", "\ufffd"),
        (r"filename*=unicode_escape''%5Cud800", "?"),
    ],
)
def test_a_name_of_a_file_is_read_as_it_was_written(written: str, name: str) -> None:
    form = read_form(FORM, field(b'name="file"; ' + written.encode()) + b"--b--\r\n")
    assert (form["file"].filename, form["file"].content) == (name, b"x")


def test_a_name_that_is_no_utf_8_is_still_text() -> None:
    form = read_form(FORM, field(b'name="file"; filename="Gr\xf6\xdfe"') + b"--b--\r\n")
    assert form["file"].filename == "Gr\ufffd\ufffde"


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters='"\\'), min_size=1))
def test_names_of_httpx_come_back(name: str) -> None:
    request = httpx.Request("POST", "http://x", files={"file": (name, b"content")})
    form = read_form(request.headers["content-type"], request.read())
    assert form["file"].filename == name and form["file"].content == b"content"


def test_a_form_of_many_fields_or_of_a_long_header_is_refused() -> None:
    fits = b"".join(field(b'name="%d"' % number) for number in range(MAX_FIELDS))
    assert len(read_form(FORM, fits + b"--b--\r\n")) == MAX_FIELDS
    for body in (fits + field(b"name=x"), field(b"name=x; a=" + b";" * MAX_HEAD_BYTES)):
        with pytest.raises(HTTPError) as refused:
            read_form(FORM, body + b"--b--\r\n")
        assert refused.value.status == 400
