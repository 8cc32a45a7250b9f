"""The rules of the house that a machine can check: which room may know what."""

import ast
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mmdet"
FAMILIES = sorted(p.name for p in (PACKAGE / "families").iterdir() if (p / "exp.py").is_file())
WORDS = re.compile(r"yolo|ppyoloe|fcos|siamese|multi_?task", re.IGNORECASE)


def modules(*rooms):
    return [p for room in rooms for p in sorted((PACKAGE / room).rglob("*.py"))]


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


@pytest.mark.parametrize("path", modules("core", "data", "evaluators"), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_core_data_and_evaluators_name_no_architecture(path):
    """Identifiers and strings; docstrings and comments may cite a source."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found += [(node.lineno, node.value)] if WORDS.search(node.value) else []
        names = (getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module"))
        found += [(getattr(node, "lineno", 0), n) for n in names if isinstance(n, str) and WORDS.search(n)]
    assert not found


@pytest.mark.parametrize(
    "path", modules("core", "data", "evaluators", "exp", "models"), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_only_exp_files_and_tests_import_a_family(path):
    assert not [name for name in imports_of(path) if name.startswith("mmdet.families")]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_do_not_import_each_other(family):
    for path in modules(f"families/{family}"):
        others = [n for n in imports_of(path) if n.startswith("mmdet.families.") and n.split(".")[2] != family]
        assert not others, f"{path} imports {others}"


@pytest.mark.parametrize("path", modules("models"), ids=lambda p: p.name)
def test_modules_never_see_the_exp(path):
    assert not [name for name in imports_of(path) if name.startswith("mmdet.exp")]


def test_no_commented_out_defaults_and_no_silent_getattr_on_an_exp():
    for path in modules("."):
        with path.open(encoding="utf-8") as file:
            text = file.read()
        assert not re.search(r"getattr\((self\.)?exp, [^)]*,[^)]*\)", text), path


def test_every_module_has_a_docstring():
    for path in [*modules("."), *sorted((ROOT / "tools").glob("*.py")), *sorted((ROOT / "exps").glob("*.py"))]:
        source = path.read_text(encoding="utf-8")
        if source.strip():
            assert ast.get_docstring(ast.parse(source)), f"{path} says nothing about itself"


def test_files_and_functions_stay_small():
    """The long tail is what makes reading hard: files up to 450 lines, functions up to 70."""
    for path in modules("."):
        with tokenize.open(path) as file:
            source = file.read()
        assert source.count("\n") <= 450, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno <= 70, f"{path}:{node.lineno} {node.name}"


def test_the_namesake_is_refused(monkeypatch):
    from importlib import metadata

    import mmdet

    monkeypatch.setattr(metadata, "version", lambda name: "3.3.0")
    with pytest.raises(ImportError, match="OpenMMLab's distribution 'mmdet' 3.3.0.*pip uninstall mmdet"):
        mmdet._refuse_namesake()
