"""The README's commands run as they stand (training ones with ``max_epoch=1``), and its tables are true."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmdet.core.summary import count_gflops, count_parameters
from mmdet.data.demo import make_demo
from mmdet.exp import get_exp
from mmdet.exp.detection import DetectionExp
from mmdet.exp.load import shipped_names

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)


def commands():
    """Every single command of the README's bash blocks."""
    return [part.strip() for block in BLOCKS for line in block.splitlines() for part in line.split("&&") if part.strip()]


def python_commands(script):
    return [c for c in commands() if script in c]


def run(command, tmp_path, **replacements):
    for old, new in replacements.items():
        command = command.replace(old.replace("__", "/"), str(new))
    words = shlex.split(command)
    assert words[0] in ("python", ".venv/bin/python")
    if "tools/train.py" in words:
        words += ["max_epoch=1", f"output_dir={tmp_path}"]
    result = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout + result.stderr


def newest(tmp_path):
    return max((tmp_path / "ppyoloe_s").iterdir(), key=lambda p: p.stat().st_mtime)


def test_the_commands_work_in_the_readmes_order(tmp_path):
    demo, *own = python_commands("tools/train.py")
    assert "--demo" in demo
    assert "training done" in run(demo, tmp_path)
    weights = newest(tmp_path) / "weights.pth"
    data = make_demo(tmp_path / "small", num_train=8, num_val=4)
    for command in own:
        log = run(command, tmp_path, **{"path__to__data": data, "weights.pth": weights})
        assert "training done" in log and ("fine-tuning from" in log or "-c" not in command)
    for command in python_commands("tools/eval.py"):
        path = newest(tmp_path)
        out = run(command, tmp_path, **{"path__to__data": data, "outputs__ppyoloe_s__<run>": path})
        assert re.search(r"^AP\s", out, re.MULTILINE)


def test_ci_sets_up_with_the_readmes_words():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    setup = next(c for c in commands() if "[test]" in c)
    assert setup.removeprefix(".venv/bin/pip ").replace("install ", "") in script.replace("install -q ", "")
    assert "-m pytest" in script and any("-m pytest" in c for c in commands())


@pytest.mark.parametrize("name", shipped_names())
def test_the_table_of_exps_is_true(name):
    row = re.search(rf"^\| `{name}` \|(.*)\|$", README, re.MULTILINE)
    assert row, f"{name} is not in the README's table"
    size, parameters, gflops, ap = (cell.strip() for cell in row[1].split("|"))
    exp = get_exp(name)
    with torch.device("meta"):
        model = exp.get_model()
    assert float(gflops) == pytest.approx(count_gflops(model, exp.summary_input()[0]), abs=0.006)
    assert int(parameters.replace(",", "")) == count_parameters(model)[0]
    assert size == size_in_words(exp) and (ap == "-" or 20 < float(ap) < 60)


def size_in_words(exp):
    if not isinstance(exp, DetectionExp):
        return exp.summary_input()[1]
    height, width = exp.test_size
    return str(height) if height == width else f"{height}x{width}"


def test_the_table_has_no_other_rows():
    assert sorted(re.findall(r"^\| `(\w+)` \| \d[^|]* \| [\d,]+ \|", README, re.MULTILINE)) == shipped_names()
