"""The deployed networks as ONNX files, and what the command line refuses."""

import numpy as np
import pytest
import torch
from track_run import clips, exp_of, trainer_of

from mmdet.core.cli import run_command
from mmdet.models.repvgg import deploy
from tools import export


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    exp = exp_of(clips(folder / "clips"), folder / "out", name="siamese_tiny", max_epoch=1)
    exp.set("exp_file", "siamese_tiny.py", "test")
    trainer_of(exp).train()
    return folder / "out" / "siamese_tiny" / "a" / "last.pth"


def test_two_networks_track_as_the_model_does(checkpoint, tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    assert run_command(export.run, ["-n", "siamese_tiny", "-c", str(checkpoint), "--output", str(tmp_path)]) == 0
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"siamese_tiny_template.onnx", "siamese_tiny_search.onnx"}
    template_net, search_net = (
        onnxruntime.InferenceSession(str(tmp_path / f"siamese_tiny_{part}.onnx"), providers=["CPUExecutionProvider"])
        for part in ("template", "search")
    )
    exp, model = export.load_model(export.make_parser().parse_intermixed_args(["-n", "siamese_tiny", "-c", str(checkpoint)]))
    model = deploy(model)
    draw = np.random.default_rng(5)
    template, search = (draw.integers(0, 256, (1, 3, n, n), dtype=np.uint8) for n in (exp.exemplar_size, exp.search_size))
    (state,) = template_net.run(["state"], {"template": template})
    score, ltrb = search_net.run(["score", "ltrb"], {"state": state, "search": search})
    with torch.no_grad():
        expected = model.search(model.encode_template(torch.from_numpy(template)), torch.from_numpy(search))
    np.testing.assert_allclose(score, expected[0], atol=1e-5)
    np.testing.assert_allclose(ltrb, expected[1], rtol=1e-4)


def test_what_cannot_be_exported_is_said(tmp_path, checkpoint, capsys):
    assert run_command(export.run, ["-c", str(tmp_path / "none.pth")]) == 2
    assert "none.pth" in capsys.readouterr().err
    assert run_command(export.run, ["-n", "siamese_tiny", "-c", str(checkpoint), "--opset", "9"]) == 2
    assert "--opset 9: expected at least 18" in capsys.readouterr().err
    assert run_command(export.run, ["-n", "siamese_tiny", "-c", str(checkpoint), "--output", str(checkpoint)]) == 2
    assert "this is a file" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(export.UsageError, match="needs the packages onnxruntime: pip install onnxruntime"):
        export.check_packages(export.PACKAGES)
