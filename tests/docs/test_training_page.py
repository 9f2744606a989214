"""The Python of docs/training.md, block after block, as a reader would run it."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def test_every_block_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert len(blocks) == 7
    assert names["draft"].config.num_steps == 3
    assert names["folder"].parent == tmp_path
    assert (names["folder"] / "export" / "config.json").is_file()
