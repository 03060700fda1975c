"""
A Hub on this machine that speaks the upload and download API as `huggingface_hub` calls it.

It has one account with one token, repositories with branches and commits, preupload, large files (in one piece or in
parts), and it checks cards.

    with LocalHub() as hub:
        environment = hub.environment(home)  # for a subprocess: endpoint, token and cache
        ...
        hub.repos["tester/model"].files()["README.md"]
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

USER, TOKEN = "tester", "hf_localtokenlocaltokenlocaltoken00"
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pickle")
REPO_ID = re.compile(r"(?:[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?/)?[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?")
LICENSES = "apache-2.0 mit bsd-3-clause cc-by-4.0 cc-by-sa-4.0 cc0-1.0 gpl-3.0 llama3 gemma other unknown".split()
YAML_BLOCK = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(\r\n|\n|$))")


@dataclass
class Commit:
    message: str
    files: dict[str, bytes]
    oid: str


@dataclass
class Repo:
    name: str
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": []})

    def commit(self, branch: str, message: str, files: dict[str, bytes]) -> Commit:
        history = self.branches[branch]
        seed = f"{self.name}{branch}{len(history)}{message}".encode()
        history.append(Commit(message, files, hashlib.sha1(seed).hexdigest()))
        return history[-1]

    def at(self, revision: str) -> Commit | None:
        if self.branches.get(revision):
            return self.branches[revision][-1]
        commits = [commit for history in self.branches.values() for commit in history if commit.oid == revision]
        return commits[-1] if commits else None

    def files(self, revision: str = "main") -> dict[str, bytes]:
        commit = self.at(revision)
        return dict(commit.files) if commit else {}


def card_errors(content: str) -> list[str]:
    """What the Hub would not accept in the metadata of a model card."""
    match = YAML_BLOCK.search(content)
    if not match:
        return ["no metadata"]
    try:
        data = yaml.safe_load(match.group(2))
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(data, dict):
        return ["metadata is no mapping"]
    errors = [f'"{key}" is empty' for key, value in data.items() if value is None or value == [] or value == ""]

    def strings(key: str, pattern: str) -> None:
        values = data.get(key, [])
        for value in values if isinstance(values, list) else [values]:
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                errors.append(f'"{key}" cannot hold {value!r}')

    strings("base_model", REPO_ID.pattern)
    strings("datasets", REPO_ID.pattern)
    strings("language", r"[a-z]{2,3}(-[A-Za-z0-9]+)*|code|multilingual")
    strings("tags", r"[^\n]{1,200}")
    strings("metrics", r"\S[^\n]*")
    for key in ("library_name", "pipeline_tag"):
        strings(key, r"[a-z0-9_-]+")
    if "license" in data and data["license"] not in LICENSES:
        errors.append(f'"license" must be one of {LICENSES}, got {data["license"]!r}')
    if "licence" in data:
        errors.append('"licence" is not a field; it is "license"')
    if "model-index" in data:
        errors += _model_index_errors(data["model-index"])
    return errors


def _model_index_errors(index: object) -> list[str]:
    if not isinstance(index, list):
        return ['"model-index" must be a list']
    errors = []
    for entry in index:
        for key in ("name", "results"):
            if not entry.get(key):
                errors.append(f'"model-index[].{key}" is required')
        for result in entry.get("results") or []:
            if not result.get("task", {}).get("type"):
                errors.append('"model-index[].results[].task.type" is required')
            for key in ("type", "name"):
                if not result.get("dataset", {}).get(key):
                    errors.append(f'"model-index[].results[].dataset.{key}" is required')
            for metric in result.get("metrics") or [{}]:
                if "type" not in metric or not isinstance(metric.get("value"), (int, float, str)):
                    errors.append('"model-index[].results[].metrics[]" needs a type and a value')
    return errors


class LocalHub:
    """
    The server and what it stores.

    Args:
        part_size: Large files above this many bytes are uploaded in parts of it.
    """

    def __init__(self, port: int = 0, part_size: int = 5 << 20, user: str = USER):
        self.part_size, self.user = part_size, user
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.bodies: dict[str, list[dict]] = {}
        self.failing: str | None = None
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """For a subprocess that takes this server for the Hub, with an empty cache at `home`."""
        removed = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "TRANSFORMERS_OFFLINE")
        kept = {name: value for name, value in os.environ.items() if name not in removed}
        values = {
            "HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "",
            **dict.fromkeys(("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"), "1"),
        }  # fmt: skip
        return {**kept, **values, **({"HF_TOKEN": token} if token else {})}

    def fail(self, what: str | None) -> None:
        """Answer every request whose path matches the pattern with 500; `None`: no more."""
        self.failing = what


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    # Answers.

    def log_message(self, *args) -> None:
        pass

    def _send(self, body: bytes = b"", status: int = 200, **headers) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object, status: int = 200, **headers) -> None:
        self._send(json.dumps(value).encode(), status, Content_Type="application/json", **headers)

    def _error(self, status: int, message: str, code: str = "") -> None:
        headers = {"X_Error_Message": message, **({"X_Error_Code": code} if code else {})}
        self._json({"error": message}, status, **headers)

    # Requests.

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _serve(self) -> None:
        hub = self.hub
        self.body = self._body()
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        with hub.lock:
            hub.requests.append((self.command, path))
            if hub.failing and re.search(hub.failing, path):
                return self._error(500, "this server was told to fail")
            if self.headers.get("Content-Type") == "application/json" and self.body:
                hub.bodies.setdefault(path, []).append(json.loads(self.body))
            for method, pattern, answer in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in method:
                    return getattr(self, answer)(*match.groups())
            return self._error(404, f"this server does not know {self.command} {path}")

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    @property
    def _authorised(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repo(self, name: str, write: bool = False) -> Repo | None:
        """The repository, or `None` after an error was sent."""
        repo = self.hub.repos.get(name)
        if write and not self._authorised:
            self._error(401, "Invalid username or password.")
        elif repo is None or (repo.private and not self._authorised):
            self._error(404, "Repository not found", "RepoNotFound")
        else:
            return repo
        return None

    def _whoami(self) -> None:
        if not self._authorised:
            return self._error(401, "Invalid username or password.")
        self._json({"type": "user", "name": self.hub.user, "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def _create(self) -> None:
        if not self._authorised:
            return self._error(401, "Invalid username or password.")
        wanted = json.loads(self.body)
        name = f"{wanted.get('organization') or self.hub.user}/{wanted['name']}"
        answer = {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name}
        if name in self.hub.repos:
            return self._json({"error": "You already created this model repo", **answer}, 409)
        self.hub.repos[name] = Repo(name, private=wanted.get("visibility") == "private" or bool(wanted.get("private")))
        start = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
        self.hub.repos[name].commit("main", "initial commit", start)
        self._json(answer)

    def _validate(self) -> None:
        errors = card_errors(json.loads(self.body)["content"])
        self._json({"errors": [{"message": e} for e in errors], "warnings": []}, 400 if errors else 200)

    def _branch(self, name: str, branch: str) -> None:
        if repo := self._repo(name, write=True):
            repo.branches.setdefault(branch, list(repo.branches["main"]))
            self._json({})

    # Uploads.

    def _preupload(self, name: str, revision: str) -> None:
        if (repo := self._repo(name, write=True)) is None:
            return
        if revision not in repo.branches:
            return self._error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        answer = []
        for wanted in json.loads(self.body)["files"]:
            large = wanted["path"].endswith(LFS_SUFFIXES)
            answer.append({"path": wanted["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False})
        self._json({"files": answer, "commitOid": repo.at(revision).oid})

    def _batch(self, name: str) -> None:
        if self._repo(name, write=True) is None:
            return
        answer = []
        for wanted in json.loads(self.body)["objects"]:
            oid, size, entry = wanted["oid"], wanted["size"], {"oid": wanted["oid"], "size": wanted["size"]}
            if oid not in self.hub.large:
                upload = {"href": f"{self.hub.endpoint}/lfs/{oid}"}
                if size > self.hub.part_size:
                    count = -(-size // self.hub.part_size)
                    parts = {str(n): f"{self.hub.endpoint}/lfs/{oid}/{n}" for n in range(1, count + 1)}
                    upload["header"] = {"chunk_size": str(self.hub.part_size), **parts}
                    upload["href"] += "/complete"
                entry["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.endpoint}/lfs/{oid}/verify"}}
            answer.append(entry)
        self._json({"transfer": "basic", "objects": answer})

    def _store(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._error(422, "the bytes do not have this sha256")
        self.hub.large[oid] = body
        self._json({})

    def _put(self, oid: str) -> None:
        self._store(oid, self.body)

    def _put_part(self, oid: str, number: str) -> None:
        self.hub.parts[oid, int(number)] = self.body
        self._send(ETag=f'"{hashlib.md5(self.body).hexdigest()}"')

    def _complete(self, oid: str) -> None:
        count = len(json.loads(self.body)["parts"])
        self._store(oid, b"".join(self.hub.parts.pop((oid, number)) for number in range(1, count + 1)))

    def _verify(self, oid: str) -> None:
        wanted = json.loads(self.body)
        if len(self.hub.large.get(oid, b"")) != wanted["size"]:
            return self._error(422, "the file is not there")
        self._json({})

    def _commit(self, name: str, revision: str) -> None:
        if (repo := self._repo(name, write=True)) is None:
            return
        files, message = repo.files(revision), ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.large:
                    return self._error(422, f"{value['path']} was not uploaded")
                files[value["path"]] = self.hub.large[value["oid"]]
            elif item["key"] == "deletedFile":
                files.pop(value["path"], None)
        if errors := card_errors(files["README.md"].decode()) if "README.md" in files else []:
            return self._error(400, "; ".join(errors))
        commit = repo.commit(revision, message, files)
        url = f"{self.hub.endpoint}/{name}/commit/{commit.oid}"
        self._json({"success": True, "commitOid": commit.oid, "commitUrl": url, "hookOutput": ""})

    # Downloads.

    def _info(self, name: str, revision: str | None = None) -> None:
        if (repo := self._repo(name)) is None:
            return
        commit = repo.at(revision or "main")
        if commit is None:
            return self._error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        match = YAML_BLOCK.search(commit.files.get("README.md", b"").decode())
        data = yaml.safe_load(match.group(2)) if match else {}
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        self._json(
            {
                "id": name, "modelId": name, "sha": commit.oid, "private": repo.private, "siblings": siblings,
                "tags": data.get("tags", []), "cardData": data,
            }
        )  # fmt: skip

    def _tree(self, name: str, revision: str, folder: str | None = None) -> None:
        if (repo := self._repo(name)) is None:
            return
        prefix = f"{folder.strip('/')}/" if folder else ""
        files = {path: body for path, body in repo.files(revision).items() if path.startswith(prefix)}
        if not files:
            return self._error(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        recursive = "recursive=true" in self.path.lower()
        answer = [
            {"type": "file", "path": path, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for path, body in sorted(files.items())
            if recursive or "/" not in path[len(prefix) :]
        ]
        self._json(answer)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        commit = repo.at(revision)
        if commit is None:
            return self._error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if path not in commit.files:
            return self._error(404, f"{path} is not in this repository", "EntryNotFound")
        body = commit.files[path]
        etag = hashlib.sha256(body).hexdigest()
        self._send(body, X_Repo_Commit=commit.oid, ETag=f'"{etag}"', X_Linked_ETag=f'"{etag}"')


_NAME = r"([^/]+/[^/]+)"
_ROUTES = [
    ("GET", "/api/whoami-v2", "_whoami"),
    ("POST", "/api/repos/create", "_create"),
    ("POST", "/api/validate-yaml", "_validate"),
    ("POST", rf"/api/models/{_NAME}/branch/(.+)", "_branch"),
    ("POST", rf"/api/models/{_NAME}/preupload/(.+)", "_preupload"),
    ("POST", rf"/api/models/{_NAME}/commit/(.+)", "_commit"),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", "_batch"),
    ("PUT", r"/lfs/(\w+)", "_put"),
    ("PUT", r"/lfs/(\w+)/(\d+)", "_put_part"),
    ("POST", r"/lfs/(\w+)/complete", "_complete"),
    ("POST", r"/lfs/(\w+)/verify", "_verify"),
    ("GET", rf"/api/models/{_NAME}/tree/([^/]+)(/.*)?", "_tree"),
    ("GET", rf"/api/models/{_NAME}/revision/(.+)", "_info"),
    ("GET", rf"/api/models/{_NAME}", "_info"),
    ("GET HEAD", rf"/{_NAME}/resolve/([^/]+)/(.+)", "_resolve"),
]
