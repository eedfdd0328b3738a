"""A server without a model, run as `python engine_stub.py HOW PORT`. HOW: "well"; "ends" (before it
answers), "refuses" (as kvfold does), "dies" or "interrupts" (its parent) at a request, "deaf" (to
SIGTERM). Needs the standard library alone: it starts at once."""

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

how, port = sys.argv[1], int(sys.argv[2])


class Handler(BaseHTTPRequestHandler):
    def answer(self, kind: str, body: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        key = os.environ.get("KVFOLD_API_KEY")
        models = {"data": [{"id": key or "stub", "max_model_len": 4096}]}
        self.answer("application/json", json.dumps({} if self.path == "/health" else models))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.send_error(404)
            return
        if how == "dies":
            print("out of memory", flush=True)
            os._exit(3)
        if how == "interrupts":
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
        count = body["max_tokens"]
        texts = [{"text": f"word{i} "} for i in range(count)]
        texts[-1]["finish_reason"] = "length"
        usage = {"completion_tokens": count, "prompt_tokens": len(body["prompt"].split())}
        events = [{"choices": [text]} for text in texts] + [{"choices": [], "usage": usage}]
        lines = [*map(json.dumps, events), "[DONE]"]
        self.answer("text/event-stream", "".join(f"data: {x}\n\n" for x in lines))

    def log_message(self, *_: object) -> None:
        pass


if how == "refuses":
    sys.exit("kvfold: error: --bits must be one of 16, 8")
if how == "ends":
    print(*(f"line {i}" for i in range(50)), sep="\n")
    sys.exit(1)
if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
