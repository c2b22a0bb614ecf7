#!/usr/bin/env python3
"""A registry on loopback that has the packages of `.ci/package`, and everything else from crates.io.

    .ci/registry.py FOLDER COMMAND..    runs COMMAND with a cargo whose crates.io it is; FOLDER keeps that cargo's home

Cargo itself keeps what it packs as an index and archives (target/package/tmp-registry). They are served as they are, under cargo's sparse
protocol; whatever else is asked for is redirected to crates.io, or to the index that CRATES_IO_INDEX names. So packages
have the names, sources and lock file that they have once they are published. PORT of the environment is the port, any free one if it is not set.
"""

import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import urllib.request

TIMEOUT = 60
UPSTREAM = os.environ.get("CRATES_IO_INDEX", "https://index.crates.io/").rstrip("/")
PACKED = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target")).absolute() / "package" / "tmp-registry"


def redirects():
    """Where crates.io keeps its archives."""
    with urllib.request.urlopen(f"{UPSTREAM}/config.json", timeout=TIMEOUT) as answer:
        return json.load(answer)["dl"].rstrip("/")


class Handler(http.server.BaseHTTPRequestHandler):
    archives = ""

    def do_GET(self):
        path = self.path.lstrip("/")
        if path == "config.json":
            port = self.server.server_address[1]
            return self.send(json.dumps({"dl": f"http://127.0.0.1:{port}/archives"}).encode())
        archive = re.fullmatch(r"archives/([\w-]+)/([\w.+-]+)/download", path)
        if archive:
            name, version = archive.groups()
            return self.file(PACKED / f"{name}-{version}.crate", f"{self.archives}/{name}/{version}/download")
        if re.fullmatch(r"[\w-]+(/[\w-]+)+", path):
            return self.file(PACKED / "index" / path, f"{UPSTREAM}/{path}")
        self.send_error(404)

    def file(self, file, elsewhere):
        if file.is_file():
            return self.send(file.read_bytes())
        self.send_response(302)
        self.send_header("Location", elsewhere)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def main():
    home, command = pathlib.Path(sys.argv[1]).absolute(), sys.argv[2:]
    names = [file.name.removesuffix(".crate") for file in PACKED.glob("*.crate")]
    if not names:
        sys.exit(f"{PACKED} has no packages: run .ci/package first")
    Handler.archives = redirects()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "0"))), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # Cargo takes what it has of a version as what it will always be; ours change until they are published.
    for name in names:
        package = name.rpartition("-")[0]
        for old in [*home.glob(f"registry/*/*/{name}*"), *home.glob(f"registry/index/*/.cache/*/*/{package}")]:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    home.mkdir(parents=True, exist_ok=True)
    index = f"sparse+http://127.0.0.1:{server.server_address[1]}/"
    (home / "config.toml").write_text(
        f'[source.crates-io]\nreplace-with = "packed"\n\n[source.packed]\nregistry = "{index}"\n'
    )
    sys.exit(subprocess.run(command, env={**os.environ, "CARGO_HOME": str(home)}).returncode)


main()
