"""Gateways that can stand between the load client and the token source, each with settings fit for production."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CACHE = ROOT / ".cache/peers"
CORES = 2


class Missing(Exception):
    """A peer that its package does not give us here."""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def python_peers():
    """A virtual environment with the pinned Python packages; made once."""
    venv, wanted = CACHE / "python", (HERE / "requirements.txt").read_bytes()
    stamp = venv / "requirements.txt"
    if not stamp.exists() or stamp.read_bytes() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        pip = [venv / "bin/pip", "install", "--quiet", "--disable-pip-version-check"]
        # sglang-router's package names torch and the like, which its Rust router never loads.
        lines = [line for line in wanted.decode().split() if not line.startswith("sglang-router")]
        subprocess.run([*pip, *lines], check=True)
        router = [line for line in wanted.decode().split() if line.startswith("sglang-router")]
        subprocess.run([*pip, "--no-deps", *router], check=True)
        subprocess.run([*pip, "setproctitle", "requests"], check=True)
        stamp.write_bytes(wanted)
    return venv / "bin"


def python_program(name):
    """A script of the environment, run by its interpreter: its first line names the place where it was installed."""
    return [python_peers() / "python", python_peers() / name]


def bifrost_program():
    """The npm package is a launcher that downloads the real program from its maker's server."""
    home = CACHE / "npm"
    home.mkdir(parents=True, exist_ok=True)
    (home / "package.json").write_bytes((HERE / "package.json").read_bytes())
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund"], cwd=home, check=True)
    launcher = home / "node_modules/.bin/bifrost"
    tried = subprocess.run([launcher, "--help"], cwd=home, capture_output=True, text=True, timeout=120)
    if tried.returncode != 0:
        lines = [line.strip() for line in tried.stderr.splitlines() if "Error: " in line or "error: " in line]
        reason = "; ".join(lines) or tried.stderr[-200:]
        raise Missing(f"its npm package only downloads the program, which failed: {reason.strip()}")
    return launcher


class Contestant:
    """A gateway process in front of the source."""

    name = ""
    settings = ""
    api_key = None

    def __init__(self, source, scratch):
        self.source, self.scratch, self.port = source, Path(scratch), free_port()
        self.addr, self.model = f"127.0.0.1:{self.port}", source["model"]

    def command(self):
        raise NotImplementedError

    def environment(self):
        return {}

    def start(self, prefix):
        self.log = open(self.scratch / f"{self.name}.log", "wb")
        self.process = subprocess.Popen([*prefix, *map(str, self.command())], stdin=subprocess.DEVNULL, stdout=self.log,
                                        stderr=self.log, env=os.environ | self.environment())
        end = time.monotonic() + 400
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > end:
                tail = (self.scratch / f"{self.name}.log").read_text(errors="replace")[-2000:]
                self.stop()
                raise Missing(f"it does not start: {tail}")
            time.sleep(0.25)
        return self

    def answers(self):
        body = {"model": self.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "seed": 0}
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(f"http://{self.addr}/v1/chat/completions", json.dumps(body).encode(), headers)
        try:
            return urllib.request.urlopen(request, timeout=5).status == 200
        except OSError:
            return False

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    @property
    def pid(self):
        return self.process.pid


class Direct(Contestant):
    name, settings = "direct", "client to source, no gateway"

    def start(self, prefix):
        self.addr = self.source["http"]
        return self

    def stop(self):
        pass

    @property
    def pid(self):
        return self.source["pid"]


class Ours(Contestant):
    name, settings = "pd-bridge", "defaults; --max-in-flight 2048"

    def command(self):
        return [self.source["pd_bridge"], "gateway", "--listen", self.addr, "--decode", self.source["control"],
                "--model", self.source["model_file"], "--max-in-flight", 2048]


class Smg(Contestant):
    name, settings = "smg", "one worker, policy round_robin, log level warn, everything else as shipped"

    def command(self):
        return [*python_program("smg"), "launch", "--host", "127.0.0.1", "--port", self.port, "--policy", "round_robin",
                "--worker-urls", f"http://{self.source['http']}", "--prometheus-port", free_port(), "--log-level", "warn",
                "--max-concurrent-requests", 2048]


class SglangRouter(Contestant):
    name, settings = "sglang-router", "one worker, policy round_robin, log level warn, everything else as shipped"

    def command(self):
        return [python_peers() / "python", "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port",
                self.port, "--policy", "round_robin", "--worker-urls", f"http://{self.source['http']}",
                "--prometheus-port", free_port(), "--log-level", "warn", "--max-concurrent-requests", 2048]


class Litellm(Contestant):
    name, settings = "litellm", f"num_workers {CORES} (its guide: one per core), log level ERROR, no database, no callbacks"
    api_key = "sk-bench"

    def command(self):
        config = self.scratch / "litellm.yaml"
        config.write_text(json.dumps({
            "model_list": [{"model_name": self.model, "litellm_params": {
                "model": f"openai/{self.model}", "api_base": f"http://{self.source['http']}/v1", "api_key": "none"}}],
            "litellm_settings": {"set_verbose": False, "request_timeout": 600},
            "general_settings": {"master_key": self.api_key}}))
        return [*python_program("litellm"), "--config", config, "--host", "127.0.0.1", "--port", self.port,
                "--num_workers", CORES]

    def environment(self):
        return {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class Bifrost(Contestant):
    name, settings = "bifrost", "one OpenAI-compatible provider, log level error"

    def command(self):
        home = self.scratch / "bifrost"
        home.mkdir(exist_ok=True)
        (home / "config.json").write_text(json.dumps({"providers": {"vllm": {
            "keys": [{"name": "k", "value": "none", "models": [self.source["model"]], "weight": 1.0}],
            "network_config": {"base_url": f"http://{self.source['http']}"}}}}))
        self.model = f"vllm/{self.source['model']}"
        return [bifrost_program(), "-app-dir", home, "-host", "127.0.0.1", "-port", self.port, "-log-level", "error"]


ALL = [Direct, Ours, Smg, Litellm, Bifrost, SglangRouter]
