"""Parse a form with an uploaded file: `multipart/form-data`.

Knows boundaries and headers, not what the fields mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value

from ..errors import HTTPError

MAX_FIELDS = 16
MAX_HEAD_BYTES = 8192  # of a field: the time to parse a header grows with the square of its length


@dataclass(frozen=True)
class FormField:
    """A field of a form.

    Attributes:
        filename: the value of `filename`, in UTF-8, or of `filename*` of RFC 5987. None if the field is not a file.
    """

    content: bytes
    filename: str | None = None

    @property
    def text(self) -> str:
        """Its content as text."""
        return self.content.decode(errors="replace")


def read_form(content_type: str | None, body: bytes) -> dict[str, FormField]:
    """Return the fields of a form by name.

    Raises:
        HTTPError: 400 if it is not a form, or has too many fields.

    >>> body = b'--b\\r\\nContent-Disposition: form-data; name="file"; filename="a"\\r\\n\\r\\n{}\\r\\n--b--\\r\\n'
    >>> read_form("multipart/form-data; boundary=b", body)
    {'file': FormField(content=b'{}', filename='a')}
    """
    declared = Message()
    declared["content-type"] = content_type or ""
    boundary = declared.get_param("boundary")
    if declared.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        message = f"the body is {content_type!r:.80}; send the file as multipart/form-data"
        raise HTTPError(400, message, code="unsupported_content_type")
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), MAX_FIELDS + 2)
    if not parts or not parts[-1].startswith(b"--") or len(parts) > MAX_FIELDS + 1:
        raise HTTPError(400, f"the form is incomplete, or has more than {MAX_FIELDS} fields")
    fields = {}
    for part in parts[:-1]:
        head, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD_BYTES:
            raise HTTPError(400, f"a field of the form has headers of {len(head)} bytes, at most {MAX_HEAD_BYTES}")
        about = HeaderParser().parsestr(head.decode(errors="replace"))
        found = dict(about.get_params([], header="content-disposition"))  # with `filename*` after `filename`
        if "name" in found:
            filename = _text(found["filename"]) if "filename" in found else None
            fields[_text(found["name"])] = FormField(content, filename)
    return fields


def _text(value: str | tuple[str | None, str | None, str]) -> str:
    """Return a parameter's value as text; a tuple is RFC 5987's: character set, language, bytes.

    Lone surrogates, which some character sets encode, become `?`: neither JSON nor SQLite has them.
    """
    text = value if isinstance(value, str) else collapse_rfc2231_value(value)
    return text.encode(errors="replace").decode()
