"""A stand-in for the Hugging Face hub: the few requests that huggingface_hub makes of it to publish
files and to read them back, over a repository in memory.

What a request may be refused with, or where the connection breaks, is set by the test.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = ".safetensors"  # files of that name go by a second request, as LFS has it


@dataclass
class Repository:
    """Commits by their id, each with all files by name, and branches by name, each at a commit."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, files: dict[str, bytes]) -> str:
        before = self.commits.get(self.branches.get(branch, ""), {})
        number = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[number] = before | files
        self.branches[branch] = number
        return number


class Hub:
    """address: of the server. token: that may write; others get a 401. breaks: part of a request's
    path at which the connection is cut; refuses: the status that such a path gets instead."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.uploaded: dict[str, bytes] = {}  # by SHA-256, in no commit yet
        self.address, self.token = "", "right"
        self.breaks: str | None = None
        self.refuses: dict[str, int] = {}
        self.requests: list[str] = []


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    do_GET = do_POST = do_PUT = do_HEAD

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.breaks and self.hub.breaks in path:
            if self.headers.get("Content-Length"):
                self.rfile.read(16)  # in the middle of what is sent
            self.close_connection = True
            self.connection.close()
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for part, status in self.hub.refuses.items():
            if part in path:
                self.reply({"error": "refused"}, status)
                return
        if self.command in ("POST", "PUT") and not self.may_write(path):
            self.reply({"error": "Invalid username or password."}, 401)
            return
        match path.strip("/").split("/"):
            case [""]:
                self.reply({})
            case ["api", "validate-yaml"]:
                self.reply({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                self.create(json.loads(body))
            case ["upload", digest]:
                self.hub.uploaded[digest] = body
                self.reply({})
            case ["api", "models", user, name, *rest]:
                self.of_model(f"{user}/{name}", rest, body)
            case [user, name, "resolve", revision, file]:
                self.send_file(f"{user}/{name}", revision, file)
            case [user, name, "info", "lfs", "objects", "batch"]:
                self.large(json.loads(body))
            case _:
                self.reply({"error": f"no such request: {path}"}, 404)

    def may_write(self, path: str) -> bool:
        return path.startswith("/upload") or (
            self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        )

    def create(self, asked: dict[str, Any]) -> None:
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        name = name if "/" in name else f"me/{name}"
        private = asked.get("private") or asked.get("visibility") == "private"
        made = self.hub.repositories.setdefault(name, Repository(bool(private)))
        if not made.commits:
            made.add("main", {".gitattributes": b"*.safetensors filter=lfs"})
        self.reply({"url": f"{self.hub.address}/{name}", "name": name})

    def of_model(self, name: str, rest: list[str], body: bytes) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.reply({"error": "Repository not found"}, 404, "RepoNotFound")
            return
        match rest:
            case [] | ["revision", *_]:
                self.info(name, repository, "/".join(rest[1:]) or "main")
            case ["tree", revision, *_]:
                files = self.files(repository, revision)
                entries = [
                    {"type": "file", "path": x, "size": len(data), "oid": blob_id(data)}
                    for x, data in (files or {}).items()
                ]
                self.reply(entries)
            case ["branch", branch]:
                repository.branches.setdefault(branch, repository.branches["main"])
                self.reply({})
            case ["preupload", *_]:
                modes = [
                    {
                        "path": x["path"],
                        "uploadMode": "lfs" if x["path"].endswith(LARGE) else "regular",
                        "shouldIgnore": False,
                    }
                    for x in json.loads(body)["files"]
                ]
                self.reply({"files": modes})
            case ["commit", *revision]:
                self.commit(name, repository, "/".join(revision), body)
            case _:
                self.reply({"error": f"no such request: {rest}"}, 404)

    def info(self, name: str, repository: Repository, revision: str) -> None:
        number = repository.branches.get(revision, revision)
        if number not in repository.commits:
            self.reply({"error": "Invalid rev id"}, 404, "RevisionNotFound")
            return
        siblings = [{"rfilename": x} for x in repository.commits[number]]
        about = {"id": name, "modelId": name, "private": repository.private, "sha": number}
        self.reply(about | {"siblings": siblings, "tags": []})

    def commit(self, name: str, repository: Repository, branch: str, body: bytes) -> None:
        files = {}
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
        number = repository.add(branch, files)
        address = f"{self.hub.address}/{name}/commit/{number}"
        self.reply({"success": True, "commitOid": number, "commitUrl": address})

    def large(self, asked: dict[str, Any]) -> None:
        objects = [
            {
                "oid": x["oid"],
                "size": x["size"],
                "actions": {"upload": {"href": f"{self.hub.address}/upload/{x['oid']}"}},
            }
            for x in asked["objects"]
        ]
        self.reply({"transfer": "basic", "objects": objects})

    def files(self, repository: Repository, revision: str) -> dict[str, bytes] | None:
        return repository.commits.get(repository.branches.get(revision, revision))

    def send_file(self, name: str, revision: str, file: str) -> None:
        repository = self.hub.repositories.get(name)
        files = None if repository is None else self.files(repository, revision)
        if files is None or file not in files:
            self.reply({"error": "Entry not found"}, 404, "EntryNotFound")
            return
        assert repository is not None
        data = files[file]
        number = repository.branches.get(revision, revision)
        self.send_response(200)
        self.send_header("ETag", f'"{blob_id(data)}"')
        self.send_header("X-Repo-Commit", number)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def reply(self, what: Any, status: int = 200, code: str | None = None) -> None:
        data = json.dumps(what).encode()
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def blob_id(data: bytes) -> str:
    """As git names a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub that answers on this machine until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
