"""The console page's own script, run by Node with stand-ins for the document, where Node is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

_DOCUMENT = """
const made = [];
const element = () => ({ style: {}, append() {}, replaceChildren() {}, setAttribute() {}, addEventListener() {} });
globalThis.document = {
  getElementById: element,
  createElement: tag => { const one = { ...element(), tag }; made.push(one); return one; },
  addEventListener() {},
};
globalThis.addEventListener = globalThis.matchMedia = () => ({});
globalThis.fetch = () => Promise.reject();
globalThis.setTimeout = () => {};
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_request_ids_are_told_apart() -> None:
    """A client's ids differ at their end; each links to its explanation, and short ones are shown whole."""
    ids = [f"req-of-one-client-and-day-{number:04d}" for number in range(3)] + ["short"]
    (script,) = re.findall(r"<script>(.*)</script>", (files("router.admin") / "console.html").read_text(), re.DOTALL)
    shown = "made.filter(each => each.tag == 'a').map(each => [each.textContent, each.title, each.href])"
    program = (
        f"{_DOCUMENT}{script}\n"
        f"drawDecisions({json.dumps([{'request_id': id_} for id_ in ids])});console.log(JSON.stringify({shown}))"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    links = json.loads(done.stdout)
    assert [title for _, title, _ in links] == ids
    assert [text for text, _, _ in links] == ["…" + id_[-17:] for id_ in ids[:3]] + ["short"]
    assert [href.endswith(id_) for (_, _, href), id_ in zip(links, ids, strict=True)] == [True] * 4
