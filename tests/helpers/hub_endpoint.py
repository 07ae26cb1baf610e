"""A hub on this machine: the part of the hub's HTTP interface that uploads and downloads of small files use."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Repositories = dict[str, dict[str, bytes]]


@contextmanager
def local_hub() -> Iterator[tuple[str, Repositories]]:
    """The address of a running hub, and the files of its repositories, which tests may read and change."""
    repositories: Repositories = {}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, content, status=200, **headers):
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts == ["api", "repos", "create"]:
                wanted = json.loads(body)
                name = f"{wanted.get('organization') or 'somebody'}/{wanted['name']}"
                repositories.setdefault(name, {})
                return self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name, "id": name})
            if parts == ["api", "validate-yaml"]:
                return self.answer({"errors": [], "warnings": []})
            name = "/".join(parts[2:4])
            if parts[4] == "preupload":
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return self.answer({"files": files})
            assert parts[4] == "commit", self.path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            address = f"http://{self.headers['Host']}/{name}/commit/{COMMIT}"
            return self.answer({"success": True, "commitOid": COMMIT, "commitUrl": address, "hookOutput": ""})

        def do_GET(self):
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts == [""]:
                return self.answer(b"a hub")
            name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
            if name not in repositories:
                return self.answer({"error": "not found"}, 404, X_Error_Code="RepoNotFound")
            files = repositories[name]
            if parts[0] == "api":
                tree = [{"type": "file", "path": path, "size": len(files[path]), "oid": COMMIT} for path in files]
                about = {"id": name, "modelId": name, "sha": COMMIT, "tags": [], "private": False}
                return self.answer(tree if "tree" in parts else about | {"siblings": [{"rfilename": f} for f in files]})
            path = "/".join(parts[4:])
            if path not in files:
                return self.answer({"error": "not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
            etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
            return self.answer(files[path], ETag=etag, X_Repo_Commit=COMMIT)

        def do_HEAD(self):
            self.do_GET()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", repositories
    finally:
        server.shutdown()
        server.server_close()
