"""The hub: cache first, then one question to it, and a clear line for each refusal.  A small local server plays the hub."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

CONFIG = json.dumps(
    {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 50, "max_position_embeddings": 77}
)
ANSWERS = {  # repository -> status, X-Error-Code
    "org/good": (200, None),
    "org/gated": (403, "GatedRepo"),
    "org/private": (401, "RepoNotFound"),
    "org/missing": (404, "RepoNotFound"),
    "org/weights-only": (404, "EntryNotFound"),
    "org/broken": (503, None),
}


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body):
        status, code = ANSWERS["/".join(self.path.split("/")[1:3])]
        self.server.asked.append((self.command, self.path))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"0123456789abcdef"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Length", str(len(CONFIG) if status == 200 else 0))
        self.end_headers()
        if body and status == 200:
            self.wfile.write(CONFIG.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def ask(repo, endpoint, home, **environment):
    code = (
        "import sys\nfrom memplan.errors import UserError\nfrom memplan.models import load\n"
        f"try:\n    spec = load({repo!r})\n    print(spec.source, spec.name, spec.task, spec.max_seq_len)\n"
        "except UserError as error:\n    print('ERROR', error)\n"
        "assert 'torch' not in sys.modules"
    )
    clean = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("HF_")}
    clean |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def address(hub):
    return f"http://127.0.0.1:{hub.server_port}"


def test_a_config_is_fetched_and_then_comes_from_the_cache_without_the_network(hub, tmp_path):
    expected = "hub org/good causal-lm 77"
    assert ask("org/good", address(hub), tmp_path) == expected
    asked = len(hub.asked)
    assert ask("org/good", address(hub), tmp_path) == expected
    assert len(hub.asked) == asked
    assert ask("org/good", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1") == expected


def test_only_the_config_is_asked_for(hub, tmp_path):
    ask("org/good", address(hub), tmp_path)
    assert {path.rpartition("/")[2] for _, path in hub.asked} == {"config.json"}


@pytest.mark.parametrize(
    ("repo", "message"),
    [
        ("org/gated", "org/gated is gated on the hub (HTTP 403)"),
        ("org/private", "the hub has no such model or keeps it private (HTTP 401)"),
        ("org/missing", "the hub has no such model or keeps it private (HTTP 404)"),
        ("org/weights-only", "org/weights-only on the hub has no config.json"),
        ("org/broken", "the hub answered HTTP 503 for org/broken"),
    ],
)
def test_a_refusal_is_told_in_one_line(hub, tmp_path, repo, message):
    answer = ask(repo, address(hub), tmp_path)
    assert answer.startswith("ERROR")
    assert message in answer
    assert "\n" not in answer


def test_an_unreachable_hub_is_named_and_near_names_are_offered(tmp_path):
    answer = ask("meta-llama/Llama-3.1-8BB", "http://127.0.0.1:9", tmp_path)
    assert "not in the catalogue, not in the hub's cache, and http://127.0.0.1:9 cannot be reached" in answer
    assert "Did you mean meta-llama/Llama-3.1-8B" in answer


def test_offline_mode_is_named(tmp_path):
    assert "and offline mode is on" in ask("org/good", "http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1")


def test_a_catalogue_name_never_asks_the_hub(hub, tmp_path):
    assert ask("gpt2", address(hub), tmp_path).startswith("catalogue openai-community/gpt2")
    assert hub.asked == []
