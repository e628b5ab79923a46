"""Tests that forked processes of a box inherit the page tables of code, and that the code does not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# prints hashes of the rights of all file pages and of the code, and counts the pages of code for which a process has
# entries in its page table before and after a fork
PROGRAM = """
import hashlib, json, os, struct, sys
from rollflow.tasks.sandboxes.box.code_pages import share_code
def look():
    parts = [line.split() for line in open('/proc/self/maps')]
    return [(*(int(x, 16) for x in part[0].split('-')), part[1]) for part in parts if part[4] != '0']
def count():
    with open('/proc/self/pagemap', 'rb', 0) as pagemap:
        found = 0
        for start, end, rights in look():
            if rights == 'r-xp':
                pagemap.seek(start // 4096 * 8)
                found += sum(e >> 63 for e, in struct.iter_unpack('=Q', pagemap.read((end - start) // 4096 * 8)))
        return found
def hash_code():
    with open('/proc/self/mem', 'rb', 0) as memory:
        found = hashlib.sha256()
        for start, end, rights in look():
            if rights == 'r-xp':
                memory.seek(start); found.update(memory.read(end - start))
        return found.hexdigest()
def list_rights():
    return [(page, rights) for start, end, rights in look() for page in range(start, end, 4096)]
before = [hashlib.sha256(repr(list_rights()).encode()).hexdigest(), hash_code()]
if sys.argv[1] == 'share': share_code()
after = [hashlib.sha256(repr(list_rights()).encode()).hexdigest(), hash_code()]
parent = count()
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, b'%d' % count()); os._exit(0)
print(json.dumps({'before': before, 'after': after, 'parent': parent, 'child': int(os.read(read, 99))}))
"""


def run(option: str) -> dict[str, Any]:
    """Run `PROGRAM` with or without shared page tables, and return its output."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / ".dev")}
    found = subprocess.run([sys.executable, "-c", PROGRAM, option], env=variables, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(found.stdout))


def test_forked_process_inherits_page_tables_of_code() -> None:
    found = run("share")
    assert found["child"] >= found["parent"] > 100
    plain = run("plain")
    assert plain["child"] < plain["parent"]


def test_sharing_page_tables_changes_no_code_and_no_rights() -> None:
    found = run("share")
    assert found["after"] == found["before"]
