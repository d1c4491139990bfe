"""A request that is not answered, in the shape that OpenAI's clients expect of an error."""

import json
from collections.abc import Mapping


class Refusal(Exception):
    """Say `message` to the client with this HTTP status; `param` names what in the request is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def body_bytes(self) -> bytes:
        # Pure ASCII: a message may quote a client's text, and that need not be valid Unicode.
        return json.dumps(self.body()).encode("ascii")
