"""Local hub server with the part of the HTTP interface that the Hugging Face client uses to push and pull models

Repositories are kept in memory; every commit has all files, as bytes. JSON and Markdown files are regular files, all
others are LFS files. Tests can damage responses through `Hub.faults`.
"""
import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Iterator, List, Optional, Tuple
from urllib.parse import unquote, urlsplit

WRITER, READER = 'hf_writer', 'hf_reader'  # tokens
CUT, ERROR, FLIP, SHORT = 'cut', 'error', 'flip', 'short'


@dataclass
class Repository:
    commits: Dict[str, Dict[str, bytes]] = field(default_factory=dict)
    branches: Dict[str, str] = field(default_factory=dict)
    private: bool = False

    def files(self, revision: str) -> Optional[Tuple[str, Dict[str, bytes]]]:
        commit = self.branches.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None

    def commit(self, files: Dict[str, bytes], branch: str = 'main') -> str:
        """Add files to a branch."""
        before = self.commits.get(self.branches.get(branch, ''), {})
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha] = {**before, **files}
        self.branches[branch] = sha
        return sha


@dataclass
class Hub:
    """State of the server.

    Attributes:
        url: Address of the server.
        repositories: Repositories by OWNER/NAME.
        faults: Faults of the next downloads of a file, by its name. `cut` sends half and closes the connection, `error`
            is status 500, `flip` changes the last byte, `short` omits it. Key `info`: faults of the next requests for
            repository info, where `cut` closes the connection. Key `upload`: faults of the next uploads, where `error`
            refuses the upload.
        requests: Method, path and byte range of every request.
        uploads: Uploaded LFS files by their checksum.
    """
    url: str = ''
    repositories: Dict[str, Repository] = field(default_factory=dict)
    faults: Dict[str, List[str]] = field(default_factory=dict)
    requests: List[Tuple[str, str, Optional[str]]] = field(default_factory=list)
    uploads: Dict[str, bytes] = field(default_factory=dict)


def is_lfs(name: str) -> bool:
    return not name.endswith(('.json', '.md'))


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b'blob %d\0' % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def handle_any(self) -> None:
        self.hub.requests.append((self.command, self.path, self.headers.get('Range')))
        body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        if self.headers.get('Transfer-Encoding') == 'chunked':
            body = b''
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        path = unquote(urlsplit(self.path).path)
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method.split():
                return answer(self, body, *match.groups())
        self.fail(404, f'no route for {self.command} {path}')

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def reply(self, value: Any, status: int = 200, **headers: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {'Content-Type': 'application/json', 'Content-Length': len(content), **headers}.items():
            self.send_header(name.replace('_', '-'), str(text))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def fail(self, status: int, message: str, code: str = '') -> None:
        self.reply({'error': message}, status, X_Error_Message=message, **({'X_Error_Code': code} if code else {}))

    def may_write(self) -> bool:
        token = self.headers.get('Authorization', '').removeprefix('Bearer ')
        if token != WRITER:
            self.fail(403 if token == READER else 401, 'this token may not write' if token else 'no token')
        return token == WRITER

    def revision(self, repo_id: str, revision: str) -> Optional[Tuple[str, Dict[str, bytes]]]:
        repository = self.hub.repositories.get(repo_id)
        if repository is None:
            self.fail(404, 'Repository not found', 'RepoNotFound')
            return None
        found = repository.files(revision)
        if found is None:
            self.fail(404, f'Invalid rev id: {revision}', 'RevisionNotFound')
        return found

    # Writing

    def create(self, body: bytes) -> None:
        if not self.may_write():
            return
        asked = json.loads(body)
        repo_id = f'{asked.get("organization") or "me"}/{asked["name"]}'
        if repo_id in self.hub.repositories:
            return self.reply({'error': 'You already created this model repo', 'url': f'{self.hub.url}/{repo_id}'}, 409)
        private = asked.get('visibility') == 'private' or bool(asked.get('private'))  # `private` in older clients
        self.hub.repositories[repo_id] = repository = Repository(private=private)
        repository.commit({'.gitattributes': b'*.safetensors filter=lfs\n'})
        self.reply({'url': f'{self.hub.url}/{repo_id}', 'name': repo_id, 'id': '1'})

    def validate_yaml(self, body: bytes) -> None:
        content = json.loads(body)['content']
        good = content.startswith('---\n')
        self.reply({'errors': [] if good else [{'message': 'no metadata'}], 'warnings': []}, 200 if good else 400)

    def preupload(self, body: bytes, repo_id: str, revision: str) -> None:
        if self.may_write() and self.revision(repo_id, revision):
            names = [file['path'] for file in json.loads(body)['files']]
            self.reply({'files': [
                {'path': name, 'uploadMode': 'lfs' if is_lfs(name) else 'regular', 'shouldIgnore': False}
                for name in names]})

    def lfs_batch(self, body: bytes, repo_id: str) -> None:
        if self.may_write():
            self.reply({'transfer': 'basic', 'objects': [
                {**entry, 'actions': {'upload': {'href': f'{self.hub.url}/lfs/{entry["oid"]}'}}}
                for entry in json.loads(body)['objects']]})

    def upload(self, body: bytes, oid: str) -> None:
        if self.hub.faults.get('upload') and self.hub.faults['upload'].pop(0) == ERROR:
            return self.fail(400, 'the disk is full')
        if hashlib.sha256(body).hexdigest() != oid:
            return self.fail(400, 'the upload is damaged')
        self.hub.uploads[oid] = body
        self.reply({})

    def commit(self, body: bytes, repo_id: str, revision: str) -> None:
        if not self.may_write() or not self.revision(repo_id, revision):
            return
        files = {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry['value']
            if entry['key'] == 'file':
                files[value['path']] = base64.b64decode(value['content'])
            elif entry['key'] == 'lfsFile':
                files[value['path']] = self.hub.uploads[value['oid']]
        sha = self.hub.repositories[repo_id].commit(files, revision)
        self.reply({'commitUrl': f'{self.hub.url}/{repo_id}/commit/{sha}', 'commitOid': sha})

    # Reading

    def info(self, body: bytes, repo_id: str, revision: Optional[str]) -> None:
        if self.hub.faults.get('info'):
            self.close_connection = self.hub.faults['info'].pop(0) == CUT
            return
        found = self.revision(repo_id, revision or 'main')
        if found:
            siblings = [{'rfilename': name} for name in found[1]]
            self.reply({'id': repo_id, 'modelId': repo_id, 'sha': found[0], 'tags': [], 'siblings': siblings})

    def tree(self, body: bytes, repo_id: str, revision: str) -> None:
        found = self.revision(repo_id, revision)
        if found:
            self.reply([{
                'type': 'file', 'path': name, 'size': len(content), 'oid': git_oid(content),
                **({'lfs': {'oid': hashlib.sha256(content).hexdigest(), 'size': len(content), 'pointerSize': 130}}
                   if is_lfs(name) else {}),
            } for name, content in found[1].items()])

    def resolve(self, body: bytes, repo_id: str, revision: str, name: str) -> None:
        found = self.revision(repo_id, revision)
        if not found:
            return
        commit, files = found
        if name not in files:
            return self.reply({'error': 'Entry not found'}, 404, X_Error_Code='EntryNotFound', X_Repo_Commit=commit)
        content = files[name]
        etag = hashlib.sha256(content).hexdigest() if is_lfs(name) else git_oid(content)
        fault = ''
        if self.command == 'GET' and self.hub.faults.get(name):
            fault = self.hub.faults[name].pop(0)
        if fault == ERROR:
            return self.fail(500, 'the disk is on fire')
        if fault == SHORT:
            content = content[:-1]
        elif fault == FLIP:
            content = content[:-1] + bytes([content[-1] ^ 1])
        asked = re.fullmatch(r'bytes=(\d+)-', self.headers.get('Range') or '')
        start = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header('X-Repo-Commit', commit)
        self.send_header('ETag', f'"{etag}"')
        self.send_header('Accept-Ranges', 'bytes')
        self.send_header('Content-Length', str(len(content) - start))
        if asked:
            self.send_header('Content-Range', f'bytes {start}-{len(content) - 1}/{len(content)}')
        self.end_headers()
        if self.command == 'HEAD':
            return
        if fault == CUT:
            self.wfile.write(content[start:(start + len(content)) // 2])
            self.close_connection = True
        else:
            self.wfile.write(content[start:])


ID = r'([\w.-]+/[\w.-]+)'
ROUTES = [
    ('POST', r'/api/repos/create', Handler.create),
    ('POST', r'/api/validate-yaml', Handler.validate_yaml),
    ('POST', rf'/api/models/{ID}/preupload/(.+)', Handler.preupload),
    ('POST', rf'/{ID}\.git/info/lfs/objects/batch', Handler.lfs_batch),
    ('PUT', r'/lfs/(\w+)', Handler.upload),
    ('POST', rf'/api/models/{ID}/commit/(.+)', Handler.commit),
    ('GET', rf'/api/models/{ID}(?:/revision/(.+))?', Handler.info),
    ('GET', rf'/api/models/{ID}/tree/([^/]+)(?:/)?', Handler.tree),
    ('GET HEAD', rf'/{ID}/resolve/([^/]+)/(.+)', Handler.resolve),
]


@contextmanager
def serve() -> Iterator[Hub]:
    """Context with a hub on a free port of the loopback interface."""
    hub = Hub()
    server = ThreadingHTTPServer(('127.0.0.1', 0), type('HubHandler', (Handler,), {'hub': hub}))
    hub.url = f'http://127.0.0.1:{server.server_address[1]}'
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
