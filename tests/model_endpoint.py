"""An OpenAI-compatible endpoint on this host that answers as it is told, and misbehaves on purpose."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from uuid import uuid4

KEY = "sk-test-0123456789"


def reply(**message: Any) -> bytes:
    reason = message.pop("reason", "stop")
    body = {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": reason}]}
    return json.dumps(body | {"usage": {"prompt_tokens": 11, "completion_tokens": 7}}).encode()


class Endpoint:
    """Answers as it is told, in order, the last answer for ever; remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint.keys.append(self.headers["Authorization"])
                endpoint.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answers = endpoint.answers
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if callable(answer):
                    answer(self)
                else:
                    send(self, *answer) if isinstance(answer, tuple) else send(self, 200, answer)
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def calls(*asked: tuple[str, dict[str, Any]]) -> bytes:
    """A reply that asks for tools: each by its name, with its arguments."""
    told = [
        {"id": uuid4().hex, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for name, arguments in asked
    ]
    return reply(content=None, tool_calls=told, reason="tool_calls")


def send(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: Any = (), *, length: int | None = None
) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    for name, value in headers:
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Half of a reply, and then nothing more."""
    whole = reply(content="Half of this")
    send(handler, 200, whole[: len(whole) // 2], length=len(whole))


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.close()


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b" " * 2**16)
    except OSError:
        pass
