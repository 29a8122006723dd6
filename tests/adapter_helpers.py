"""A random LoRA adapter made by PEFT, and a model hub on this machine to serve it from.

The host takes adapters from a hub only: it asks the hub whether the repository has safetensors, so that a plain folder
is refused. `HF_ENDPOINT` sends it here instead.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import LlamaForCausalLM

REVISION = "0" * 40
COMMIT = {"id": REVISION, "title": "", "date": "2024-01-01T00:00:00.000Z"}


def make_adapter(base: Path, path: Path, *, rank: int = 4, seed: int = 0) -> Any:
    """Write an adapter for the checkpoint `base` to `path`.

    :returns: PEFT's own model with the adapter, the local reference
    """
    from peft import LoraConfig, get_peft_model

    model = LlamaForCausalLM.from_pretrained(base, torch_dtype=torch.float32)
    config = LoraConfig(
        r=rank, lora_alpha=4 * rank, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(str(path), safe_serialization=True)
    return adapted.eval()


class LocalHub:
    """Serves folders as repositories over the part of the hub's HTTP interface that the host uses; a context manager.

    :param repositories: repository name ("owner/name") to folder
    """

    def __init__(self, repositories: dict[str, Path]) -> None:
        self._repositories = dict(repositories)
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(body=True)

            def do_HEAD(self) -> None:
                self._answer(body=False)

            def _answer(self, body: bool) -> None:
                path = self.path.split("?")[0]
                hub.requests.append(path)
                found = hub.find([part for part in path.split("/") if part])
                data = b"" if found is None else found
                self.send_response(404 if found is None else 200)
                if found is None:
                    self.send_header("X-Error-Code", "RepoNotFound" if path.startswith("/api/") else "EntryNotFound")
                self.send_header("X-Repo-Commit", REVISION)
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if body:
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="local-hub", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def find(self, parts: Sequence[str]) -> bytes | None:
        """`api/models/OWNER/NAME[/revision/R | /tree/R]`, or `OWNER/NAME/resolve/R/FILE`."""
        api, parts = parts[:2] == ["api", "models"], parts[2:] if parts[:2] == ["api", "models"] else parts
        folder = self._repositories.get("/".join(parts[:2]))
        if folder is None:
            return None
        if not api:
            file = folder / parts[-1]
            return file.read_bytes() if parts[2] == "resolve" and file.is_file() else None
        files = [path for path in sorted(folder.iterdir()) if path.is_file()]
        if parts[2:3] == ["tree"]:
            known = {"type": "file", "oid": REVISION, "lastCommit": COMMIT}
            return json.dumps([{**known, "path": f.name, "size": f.stat().st_size} for f in files]).encode()
        siblings = [{"rfilename": file.name} for file in files]
        return json.dumps({"id": "/".join(parts[:2]), "sha": REVISION, "siblings": siblings}).encode()

    def __enter__(self) -> LocalHub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
